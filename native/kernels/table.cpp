// The table of one ISA level.
#include "attention.h"
#include "cache.h"
#include "draft.h"
#include "elementwise.h"
#include "kernels.h"
#include "linear.h"
#include "peak.h"
#include "sample.h"

#define TENFOLD_TEXT(x) #x
#define TENFOLD_NAME(x) TENFOLD_TEXT(x)

namespace tenfold::TENFOLD_LEVEL {

const Kernels& kernels() {
  static const Kernels table{
      TENFOLD_NAME(TENFOLD_LEVEL),
      linear_quant,
      linear_float,
      put_panel,
      quantize,
      rms_norm,
      gate,
      rope,
      softcap,
      store_kv,
      attention,
      attention_products,
      attention_values,
      sample,
      gumbel,
      best_row,
      normalizer,
      dot_products,
  };
  return table;
}

}  // namespace tenfold::TENFOLD_LEVEL
