@triton.jit(do_not_specialize=['rows'])
def kernel(in0, out0, rows, r0_0, r1_0):
    af_overlap()
    pid = tl.program_id(0)
    row = pid
    g0 = row
    b5 = g0.to(tl.int64) * r0_0 * 16
    b19 = g0.to(tl.int64) * r1_0 * 16
    acc1m = tl.full((1024,), -3.4028234663852886e38, tl.float32)
    acc1 = tl.zeros((1024,), tl.float32)
    for i2 in range(0, 4000, 1024):
        c3 = i2 + tl.arange(0, 1024)
        m4 = c3 < 4000
        x6 = tl.load(in0 + b5 + c3, mask=m4, other=0)
        v7 = tl.where(m4, x6, float("-inf"))
        v8 = af_exp((-tl.abs(v7 - acc1m)))
        acc1 = tl.where(v7 > acc1m, acc1 * v8 + 1.0, acc1 + v8)
        acc1m = tl.maximum(acc1m, v7)
    s9 = tl.max(acc1m, axis=0)
    s10 = tl.sum((acc1 * af_exp(acc1m - s9)), axis=0)
    s11 = tl.where(s9 == float("inf"), float("nan"), s10)
    for i12 in range(0, 4000, 1024):
        c13 = i12 + tl.arange(0, 1024)
        m14 = c13 < 4000
        x15 = tl.load(in0 + b5 + c13, mask=m14, other=0)
        v16 = x15 - s9
        v17 = af_exp(v16)
        v18 = tl.div_rn(v17, s11)
        tl.store(out0 + b19 + c13, v18, mask=m14)
