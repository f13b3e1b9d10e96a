#include "cpu/arguments.h"

namespace qshard::cpu {

void fail_dtype(const char* op, const char* name, DType dtype, const char* allowed) {
  fail("{}: {} is {}, the CPU backend takes {}", op, name, dtype_name(dtype), allowed);
}

}  // namespace qshard::cpu
