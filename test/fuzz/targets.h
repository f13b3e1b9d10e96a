// What is fuzzed: readers of files that others made. A target may throw qshard::Error, which is how
// a reader refuses; anything else (a crash, a hang, another exception, memory beyond what the file
// holds) is a fault. test/fuzz/fuzz.mk runs them under libFuzzer, test/unit/fuzz_seeds_test.cpp
// replays the seeds.
//
// HDF5 files are not mutated byte by byte, because the HDF5 library itself crashes on such files:
// the bytes are edits (see Hdf5Edits) of a good file's attributes and datasets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/world.h"

namespace qshard::fuzz {

using Target = void (*)(const World& world, const uint8_t* data, size_t size);

struct NamedTarget {
  const char* name;  // folder of its seeds
  Target run;
};

void safetensors(const World& world, const uint8_t* data, size_t size);  // a file
void index(const World& world, const uint8_t* data, size_t size);   // model.safetensors.index.json
void config(const World& world, const uint8_t* data, size_t size);  // config.json
// First byte modulo 4: a file read as auto, raw-u16, raw-u32; edits of an HDF5 token file.
void tokens(const World& world, const uint8_t* data, size_t size);
void checkpoint(const World& world, const uint8_t* data, size_t size);  // edits of a checkpoint

constexpr NamedTarget kTargets[] = {{"safetensors", safetensors},
                                    {"index", index},
                                    {"config", config},
                                    {"tokens", tokens},
                                    {"checkpoint", checkpoint}};

}  // namespace qshard::fuzz
