#include "comm/node_exchange.h"

#include <exception>

#include "comm/duplicate.h"

namespace qshard {
namespace {

bool all_done(std::vector<MPI_Request>& requests) {
  int done = 1;
  if (!requests.empty())
    QS_MPI(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done,
                       MPI_STATUSES_IGNORE));
  if (done) requests.clear();
  return done;
}

}  // namespace

NodeExchange::NodeExchange(const World& world, const NodeMap& nodes, const UnitTable& units,
                           Device& device)
    : nodes_(nodes), units_(units) {
  if (nodes.nodes() == 1) return;
  rows_comm_ = duplicate(world.comm());
  sums_comm_ = duplicate(world.comm());
  for (int u = 0; u < units.size(); ++u) {
    const UnitSpec& spec = units.spec(u);
    UnitRows unit{{}, {}, BlockType(units.packed_at(u), spec.pieces, DType::f32)};
    unit.types.emplace_back(rows_in_full(spec, world.rank()), spec.pieces, spec.param_dtype);
    for (int ward : nodes.wards())
      unit.types.emplace_back(rows_in_full(spec, ward), spec.pieces, spec.param_dtype);
    rows_.push_back(std::move(unit));
  }
  const int64_t wards = static_cast<int64_t>(nodes.wards().size());
  for (const GradSlot& slot : units.slots()) {
    const int64_t n = slot.packed_elements;
    sums_.push_back({Buffer(device, DType::f32, {nodes.nodes() * n}, Segment::communication,
                            "gradient sums of the nodes"),
                     Buffer(device, DType::f32, {wards * n}, Segment::communication,
                            "gradient sums for other nodes"),
                     {}});
  }
}

NodeExchange::~NodeExchange() {
  if (rows_comm_ == MPI_COMM_NULL || std::uncaught_exceptions() > 0) return;
  MPI_Comm_free(&rows_comm_);
  MPI_Comm_free(&sums_comm_);
}

void NodeExchange::start_rows(int unit, char* full) {
  if (nodes_.nodes() == 1) return;
  UnitRows& rows = rows_[unit];
  for (size_t w = 0; w < nodes_.wards().size(); ++w)
    QS_MPI(MPI_Irecv(full, 1, rows.types[w + 1].get(), nodes_.wards()[w], unit, rows_comm_,
                     &rows.requests.emplace_back()));
  for (int n = 0; n < nodes_.nodes(); ++n)
    if (n != nodes_.node())
      QS_MPI(MPI_Isend(full, 1, rows.types[0].get(), nodes_.agent(n), unit, rows_comm_,
                       &rows.requests.emplace_back()));
}

bool NodeExchange::rows_done(int unit) {
  return nodes_.nodes() == 1 || all_done(rows_[unit].requests);
}

void NodeExchange::start_sums(int unit, int slot) {
  if (nodes_.nodes() == 1) return;
  for (int n = 0; n < nodes_.nodes(); ++n)
    if (n != nodes_.node())
      QS_MPI(MPI_Irecv(sums_[slot].from_nodes->as<float>() + n * units_.packed_elements(unit), 1,
                       rows_[unit].sums.get(), nodes_.agent(n), unit, sums_comm_,
                       &sums_[slot].requests.emplace_back()));
}

void NodeExchange::send_sums(int unit, int slot) {
  for (size_t w = 0; w < nodes_.wards().size(); ++w) {
    const int64_t first = static_cast<int64_t>(w) * units_.packed_elements(unit);
    QS_MPI(MPI_Isend(sums_[slot].for_wards->as<float>() + first, 1, rows_[unit].sums.get(),
                     nodes_.wards()[w], unit, sums_comm_, &sums_[slot].requests.emplace_back()));
  }
}

bool NodeExchange::sums_done(int slot) {
  return nodes_.nodes() == 1 || all_done(sums_[slot].requests);
}

Tensor NodeExchange::packed(const Buffer& buffer, int unit, int64_t index, int piece) const {
  const int64_t first = index * units_.packed_elements(unit) + units_.packed_at(unit)[piece];
  return Tensor(buffer->as<float>() + first, DType::f32, {units_.piece(unit, piece).count});
}

Tensor NodeExchange::ward_sum(int unit, int slot, size_t ward, int piece) const {
  return packed(sums_[slot].for_wards, unit, static_cast<int64_t>(ward), piece);
}

Tensor NodeExchange::node_sum(int unit, int slot, int node, int piece) const {
  return packed(sums_[slot].from_nodes, unit, node, piece);
}

}  // namespace qshard
