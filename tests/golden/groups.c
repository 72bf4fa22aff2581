/* vector=256 */

void kernel(void **in, void **out, const int64_t *a, int64_t threads) {
  const uint16_t *restrict in0 = in[0];
  uint16_t *restrict out0 = out[0];
  uint16_t *restrict out1 = out[1];
  const int64_t rows = a[0]; (void)rows;
  const int64_t r0_0 = a[1]; (void)r0_0;
  const int64_t r2_0 = a[2]; (void)r2_0;
  const int64_t r1_0 = a[3]; (void)r1_0;
  #pragma omp parallel num_threads((int)threads) if(threads > 1)
  {
  #pragma omp for schedule(static, 4)
  for (int64_t unit = 0; unit < rows * 1; ++unit) {
    int64_t left = unit; (void)left;
    const int64_t g0 = left; (void)g0;
      float s1 = 0;
      for (int64_t c2 = 0; c2 < 8; ++c2) {
        #pragma omp simd reduction(+:s1)
        for (int64_t c3 = 0; c3 < 8; ++c3) {
          const float x4 = af_from_bf16(in0[g0 * r0_0 + c2 * 8 + c3]);
          const float v5 = x4 * x4;
          s1 += v5;
        }
      }
      const float v6 = s1 * 0.015625f;
      const float v7 = v6 + 9.999999747378752e-06f;
      const float v8 = 1.0f / sqrtf(v7);
      for (int64_t c9 = 0; c9 < 8; ++c9) {
        int32_t s10 = INT32_MIN;
        for (int64_t c11 = 0; c11 < 8; ++c11) {
          const float x12 = af_from_bf16(in0[g0 * r0_0 + c9 * 8 + c11]);
          const float v13 = x12 * v8;
          const float v14 = fabsf(v13);
          const int32_t v15 = (int32_t)af_bits(v14);
          s10 = v15 > s10 ? v15 : s10;
        }
        const float v16 = af_float((uint32_t)s10);
        const float v17 = v16 + 0.1f;
        const float v18 = 1.0f / v17;
        #pragma omp simd
        for (int64_t c19 = 0; c19 < 8; ++c19) {
          const float x20 = af_from_bf16(in0[g0 * r0_0 + c9 * 8 + c19]);
          const float v21 = x20 * v8;
          const float v22 = v21 * v18;
          out1[g0 * r2_0 + c9 * 8 + c19] = af_to_bf16(v22);
        }
        out0[g0 * r1_0 + c9] = af_to_bf16(v16);
      }
  }
  }
}
