#pragma once
#include "kernels.h"

namespace tenfold::TENFOLD_LEVEL {

void attention_bf16(const AttentionItem& item);
void attention_f32(const AttentionItem& item);

}  // namespace tenfold::TENFOLD_LEVEL
