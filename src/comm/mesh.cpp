#include "comm/mesh.h"

#include <algorithm>
#include <charconv>
#include <exception>

namespace qshard {
namespace {

// A whole number without sign, or -1.
int64_t number_of(std::string_view text) {
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? value : -1;
}

std::string shapes_of(int ranks) {
  std::vector<std::string> shapes;
  for (int r = 1; r <= ranks; ++r)
    if (ranks % r == 0) shapes.push_back(fmt::format("{}x{}", r, ranks / r));
  return fmt::format("{}", fmt::join(shapes, ", "));
}

// Why the ranks of a node cannot be a replica, or an empty text.
std::string no_node_mesh(const std::vector<int>& nodes, int count) {
  const int ranks = static_cast<int>(nodes.size());
  if (count == 1) return "one node";
  for (int node = 0; node < count; ++node)
    if (std::count(nodes.begin(), nodes.end(), node) * count != ranks)
      return fmt::format("{} nodes have different numbers of ranks", count);
  if (!std::is_sorted(nodes.begin(), nodes.end()))
    return "successive ranks are on different nodes (start them by blocks)";
  return "";
}

}  // namespace

MeshShape choose_mesh(const std::string& text, const std::vector<int>& nodes) {
  const int ranks = static_cast<int>(nodes.size());
  if (text == "full") return {1, ranks, ""};
  if (text == "auto") {
    const int count = 1 + *std::max_element(nodes.begin(), nodes.end());
    const std::string reason = no_node_mesh(nodes, count);
    if (!reason.empty()) return {1, ranks, reason};
    return {count, ranks / count, fmt::format("{} nodes of {} ranks", count, ranks / count)};
  }
  const size_t x = text.find('x');
  const int64_t replicas = number_of(std::string_view(text).substr(0, x));
  const int64_t shards =
      x == std::string::npos ? -1 : number_of(std::string_view(text).substr(x + 1));
  if (replicas < 1 || shards < 1)
    fail_usage(
        "fsdp.mesh {}: expected full, auto, or RxS with R replicas and S shards of at least 1: {}",
        text, shapes_of(ranks));
  if (replicas > ranks || shards > ranks || replicas * shards != ranks)
    fail_usage("fsdp.mesh {}: {} replicas × {} shards do not make the {} ranks of this run: {}",
               text, replicas, shards, ranks, shapes_of(ranks));
  return {static_cast<int>(replicas), static_cast<int>(shards), ""};
}

Mesh::Mesh(World& world, const MeshShape& shape) : world_(world), shape_(shape) {
  QS_CHECK(shape.replicas * shape.shards == world.size(), "a mesh of {} for {} ranks", shape.str(),
           world.size());
  // Of the ranks whose numbers are the same after a division by `successive`, or modulo that.
  const auto part = [&](int successive, bool modulo) {
    if (!world.is_imagined())
      return world.split(modulo ? world.rank() % successive : world.rank() / successive);
    const int size = modulo ? world.size() / successive : successive;
    const int on_node = modulo ? world.node_size() / successive : world.node_size();
    return World::imagined(size, std::max(1, on_node));
  };
  if (shape.replicas > 1) {
    shards_ = part(shape.shards, false);
    replicas_ = part(shape.shards, true);
  }
  if (shape.group > 0) group_ = part(shape.group, false);
}

World& Mesh::replicas() const {
  QS_CHECK(replicas_, "the mesh {} has one replica", shape_.str());
  return *replicas_;
}

World& Mesh::group() const {
  QS_CHECK(group_, "the mesh {} has no groups", shape_.str());
  return *group_;
}

// Rank 0 is of the first replica and knows how it went there.
void Mesh::on_first_replica(const std::function<void()>& fn) const {
  if (shape_.replicas == 1) return fn();
  std::string problem;
  int64_t code = 0;
  try {
    if (replica() == 0) fn();
  } catch (const AgreedError& error) {
    problem = error.what();
    code = world_.rank() == 0 ? error.code : 0;
  }
  world_.all_reduce_sum(&code, 1);
  problem = world_.broadcast(problem, 0);
  if (code) throw AgreedError(problem, static_cast<int>(code));
}

void Mesh::in_parts(const std::function<void()>& fn) const {
  if ((!shards_ && !group_) || world_.is_imagined()) return fn();
  std::exception_ptr problem;
  try {
    fn();
  } catch (const AgreedError&) {
    problem = std::current_exception();
  }
  collectively(world_, [&] {
    if (problem) std::rethrow_exception(problem);
  });
}

}  // namespace qshard
