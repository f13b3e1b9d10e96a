// A benchmark's document as a table or as JSON.
#pragma once

#include "train/bench.h"

namespace qshard {

// Fields, then the rows as columns of even width; numbers with four digits.
std::string bench_table(const Document& document);

}  // namespace qshard
