@triton.jit(do_not_specialize=['rows', 'e1'])
def kernel(in0, in1, in2, out0, rows, e1, r0_0, r0_1, r1_0, r2_0, r3_0, r3_1):
    af_overlap()
    pid = tl.program_id(0)
    row = pid * 32 + tl.arange(0, 32)
    row_ok = row < rows
    g1 = row % e1
    q1 = row // e1
    g0 = q1
    b2 = g0.to(tl.int64) * r0_0 * 16
    b3 = g1.to(tl.int64) * r0_1 * 16
    b5 = g0.to(tl.int64) * r1_0 * 16
    b9 = g0.to(tl.int64) * r2_0 * 16
    b13 = g0.to(tl.int64) * r3_0 * 16
    b14 = g1.to(tl.int64) * r3_1 * 16
    start = tl.program_id(1) * 16
    c1 = start + tl.arange(0, 16)[None, :]
    x4 = tl.load(in0 + b2[:, None] + b3[:, None] + c1, mask=(row_ok[:, None]), other=0).to(tl.float32)
    x6 = tl.load(in1 + b5[:, None] + c1, mask=(row_ok[:, None]), other=0).to(tl.float32)
    v7 = x4 * x6
    x8 = tl.load(in0 + b2[:, None] + b3[:, None] + 16 + c1, mask=(row_ok[:, None]), other=0).to(tl.float32)
    x10 = tl.load(in2 + b9[:, None] + c1, mask=(row_ok[:, None]), other=0).to(tl.float32)
    v11 = x8 * x10
    v12 = v7 - v11
    tl.store(out0 + b13[:, None] + b14[:, None] + c1, v12.to(tl.float16), mask=(row_ok[:, None]))
    v15 = x8 * x6
    v16 = x4 * x10
    v17 = v15 + v16
    tl.store(out0 + b13[:, None] + b14[:, None] + 16 + c1, v17.to(tl.float16), mask=(row_ok[:, None]))
