// libFuzzer's entry: one program for each target of targets.h, chosen by FUZZ_TARGET.
#include "targets.h"

namespace {

qshard::World& world() {
  static qshard::World one(nullptr, nullptr);
  return one;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  qshard::fuzz::FUZZ_TARGET(world(), data, size);
  return 0;
}
