#pragma once
#include "kernels.h"

namespace tenfold::TENFOLD_LEVEL {

void attention(KvFormat format, const AttentionItem& item);
void attention_products(KvFormat format, const AttentionItem& item, int begin, int end);
void attention_values(KvFormat format, const AttentionItem& item, int begin, int end);

}  // namespace tenfold::TENFOLD_LEVEL
