#pragma once
#include "kernels.h"

namespace tenfold::TENFOLD_LEVEL {

void attention(KvFormat format, const AttentionItem& item);

}  // namespace tenfold::TENFOLD_LEVEL
