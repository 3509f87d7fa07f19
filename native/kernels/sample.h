#pragma once
#include "kernels.h"

namespace tenfold::TENFOLD_LEVEL {

SampleResult sample(float* logits, int vocab, const SampleParams& p, SampleScratch scratch, int32_t* top_tokens,
                    float* top_logprobs);
void gumbel(uint64_t seed, int64_t position, int first_token, int count, float* out);

}  // namespace tenfold::TENFOLD_LEVEL
