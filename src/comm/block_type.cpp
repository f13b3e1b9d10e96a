#include "comm/block_type.h"

namespace qshard {

MPI_Datatype mpi_type(DType dtype) {
  QS_CHECK(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::fp16,
           "dtype {} does not move between ranks: expected f32, bf16 or fp16", dtype_name(dtype));
  return dtype == DType::f32 ? MPI_FLOAT : MPI_UINT16_T;
}

BlockType::BlockType(const std::vector<int64_t>& first, const std::vector<Piece>& pieces,
                     DType dtype) {
  std::vector<int> lengths;
  std::vector<MPI_Aint> bytes;
  for (size_t p = 0; p < pieces.size(); ++p) {
    lengths.push_back(static_cast<int>(pieces[p].count));
    bytes.push_back(static_cast<MPI_Aint>(first[p] * static_cast<int64_t>(dtype_size(dtype))));
  }
  QS_MPI(MPI_Type_create_hindexed(static_cast<int>(lengths.size()), lengths.data(), bytes.data(),
                                  mpi_type(dtype), &type_));
  QS_MPI(MPI_Type_commit(&type_));
}

BlockType::~BlockType() {
  if (type_ != MPI_DATATYPE_NULL) MPI_Type_free(&type_);
}

std::vector<int64_t> rows_in_full(const UnitSpec& spec, int rank) {
  std::vector<int64_t> first;
  for (const Piece& piece : spec.pieces) first.push_back(piece.offset + rank * piece.count);
  return first;
}

}  // namespace qshard
