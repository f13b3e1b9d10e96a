// MPI datatypes for rows of parameters: the elements move as bits, at any distance from each other.
#pragma once

#include <mpi.h>

#include <utility>
#include <vector>

#include "comm/collectives.h"

namespace qshard {

MPI_Datatype mpi_type(DType dtype);  // of f32, bf16 or fp16

// One item made of blocks: pieces[p].count elements from element first[p] of a buffer.
// Displacements are inside the type as 64-bit bytes, where the int arguments of MPI's calls would
// overflow.
class BlockType {
 public:
  BlockType(const std::vector<int64_t>& first, const std::vector<Piece>& pieces, DType dtype);
  ~BlockType();
  BlockType(BlockType&& other) noexcept : type_(std::exchange(other.type_, MPI_DATATYPE_NULL)) {}
  BlockType& operator=(BlockType&& other) = delete;
  MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

// First elements of a rank's rows in a unit's full buffer.
std::vector<int64_t> rows_in_full(const UnitSpec& spec, int rank);

}  // namespace qshard
