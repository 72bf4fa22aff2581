/* vector=256 */

void kernel(void **in, void **out, const int64_t *a, int64_t threads) {
  const float *restrict in0 = in[0];
  float *restrict out0 = out[0];
  const int64_t rows = a[0]; (void)rows;
  const int64_t r0_0 = a[1]; (void)r0_0;
  const int64_t r1_0 = a[2]; (void)r1_0;
  #pragma omp parallel num_threads((int)threads) if(threads > 1)
  {
  float *restrict buf0 = aligned_alloc(64, 448);
  #pragma omp for schedule(static, 4)
  for (int64_t unit = 0; unit < rows * 1; ++unit) {
    int64_t left = unit; (void)left;
    const int64_t g0 = left; (void)g0;
      float s1 = -INFINITY;
      #pragma omp simd reduction(max:s1)
      for (int64_t c2 = 0; c2 < 100; ++c2) {
        const float x3 = in0[g0 * r0_0 + c2];
        s1 = x3 > s1 ? x3 : s1;
      }
      float s4 = 0;
      #pragma omp simd reduction(+:s4)
      for (int64_t c5 = 0; c5 < 100; ++c5) {
        const float x6 = in0[g0 * r0_0 + c5];
        const float v7 = x6 - s1;
        const float v8 = af_exp(v7);
        s4 += v8;
        buf0[c5] = v8;
      }
      #pragma omp simd
      for (int64_t c9 = 0; c9 < 100; ++c9) {
        const float v10 = buf0[c9] / s4;
        out0[g0 * r1_0 + c9] = v10;
      }
  }
  free(buf0);
  }
}
