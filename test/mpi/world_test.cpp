#include "comm/world.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "../test_main.h"

namespace qshard {
namespace {

using Environment = std::map<std::string, std::string>;

// Whether every rank holds the same text.
bool same_on_all_ranks(const std::string& text) {
  int64_t same = test_world().broadcast(text, 0) == text;
  test_world().all_reduce_sum(&same, 1);
  return same == test_world().size();
}

template <typename F>
std::string agreed_message(F&& fn) {
  try {
    collectively(test_world(), fn);
  } catch (const AgreedError& error) {
    return error.what();
  }
  return "nothing thrown";
}

TEST(World, CountsRanksAndNodes) {
  const World& world = test_world();
  int64_t ranks[2] = {world.rank(), 1};
  world.all_reduce_sum(ranks, 2);
  EXPECT_EQ(ranks[1], world.size());
  EXPECT_EQ(ranks[0], int64_t{world.size()} * (world.size() - 1) / 2);
  EXPECT_LE(world.node_size(), world.size());
  EXPECT_LT(world.node_rank(), world.node_size());
  EXPECT_GE(world.cpus(), 1);
  EXPECT_GE(world.threads_per_rank(), 1);
  EXPECT_LE(world.threads_per_rank() * world.node_size(),
            std::max(world.cpus(), world.node_size()));
  EXPECT_FALSE(world.host().empty());
  EXPECT_EQ(world.mpi_version().find('\n'), std::string::npos);
}

TEST(World, SplitsIntoPartsInRankOrder) {
  const World& world = test_world();
  for (int parts : {1, 2, 3}) {
    const int color = world.rank() % parts;
    const std::unique_ptr<World> part = world.split(color);
    EXPECT_EQ(part->rank(), world.rank() / parts);
    EXPECT_EQ(part->size(), (world.size() - color + parts - 1) / parts);
    EXPECT_LE(part->node_size(), std::min(part->size(), world.node_size()));
    EXPECT_EQ(part->machine_size(), world.machine_size());
    EXPECT_EQ(part->threads_per_rank(), world.threads_per_rank());
    EXPECT_EQ(part->host(), world.host());
    int64_t sum = world.rank();  // of this part alone
    part->all_reduce_sum(&sum, 1);
    int64_t expected = 0;
    for (int r = color; r < world.size(); r += parts) expected += r;
    EXPECT_EQ(sum, expected);
  }
}

TEST(World, NumbersItsNodes) {
  const World& world = test_world();
  const std::vector<int> nodes = world.nodes_by_rank();
  ASSERT_EQ(std::ssize(nodes), world.size());
  EXPECT_EQ(nodes[0], 0);
  EXPECT_EQ(*std::max_element(nodes.begin(), nodes.end()), world.nodes() - 1);
}

TEST(World, SumsInRankOrderWithTheSameBitsEverywhere) {
  const World& world = test_world();
  // Terms of very different size, so that any other order of summation gives other bits.
  auto term = [](int rank, int i) { return std::sin(1 + rank * 7 + i) * std::pow(10.0, rank % 5); };
  constexpr int n = 33;
  double sums[n], expected[n];
  for (int i = 0; i < n; ++i) {
    sums[i] = term(world.rank(), i);
    expected[i] = term(0, i);
    for (int r = 1; r < world.size(); ++r) expected[i] += term(r, i);
  }
  world.all_reduce_sum(sums, n);
  EXPECT_EQ(std::memcmp(sums, expected, sizeof sums), 0);
  EXPECT_TRUE(same_on_all_ranks(std::string(reinterpret_cast<char*>(sums), sizeof sums)));
}

TEST(World, MaximumKeepsNan) {
  const World& world = test_world();
  double values[3] = {-1.0 * world.rank() - 1, 1.0 * world.rank(), 0};
  if (world.rank() == world.size() / 2) values[2] = std::numeric_limits<double>::quiet_NaN();
  world.all_reduce_max(values, 3);
  EXPECT_EQ(values[0], -1.0);
  EXPECT_EQ(values[1], world.size() - 1.0);
  EXPECT_TRUE(std::isnan(values[2]));
}

TEST(World, MovesTexts) {
  const World& world = test_world();
  const int last = world.size() - 1;
  const std::string text = "from " + std::string(world.rank() * 100, 'x') + '\0' + "end";
  EXPECT_EQ(world.broadcast(text, last), "from " + std::string(last * 100, 'x') + '\0' + "end");
  EXPECT_EQ(world.broadcast("", last), "");
  const std::vector<std::string> all = world.gather(text);
  ASSERT_EQ(all.size(), world.rank() == 0 ? world.size() : 0u);
  for (size_t r = 0; r < all.size(); ++r)
    EXPECT_EQ(all[r], "from " + std::string(r * 100, 'x') + '\0' + "end");
}

TEST(Collectively, ReturnsWhenNoRankFails) {
  int calls = 0;
  EXPECT_NO_THROW(collectively(test_world(), [&] { ++calls; }));
  EXPECT_EQ(calls, 1);
}

TEST(Collectively, OneFailingRankIsNamedOnAll) {
  const int last = test_world().size() - 1;
  const std::string message = agreed_message([&] {
    if (test_world().rank() == last) fail("cannot open tokens.h5");
  });
  EXPECT_NE(message.find("cannot open tokens.h5"), std::string::npos) << message;
  if (test_world().size() > 1) {
    EXPECT_NE(message.find(fmt::format("rank {} on ", last)), std::string::npos) << message;
  }
  EXPECT_TRUE(same_on_all_ranks(message));
}

TEST(Collectively, LowestOfSeveralFailingRanksSpeaks) {
  const std::string message = agreed_message([] { fail("{} is wrong", test_world().rank()); });
  EXPECT_NE(message.find("0 is wrong"), std::string::npos) << message;
  EXPECT_TRUE(same_on_all_ranks(message));
}

TEST(Collectively, SameFailureEverywhereIsSaidOnceAndKeepsItsCode) {
  try {
    collectively(test_world(), [] { fail_usage("no such file: a.json"); });
    FAIL() << "nothing thrown";
  } catch (const AgreedError& error) {
    EXPECT_STREQ(error.what(), "no such file: a.json");
    EXPECT_EQ(error.code, kExitUsage);
  }
}

TEST(Collectively, PassesForeignExceptionsOn) {
  EXPECT_NE(agreed_message([] {
              if (test_world().rank() == 0) throw std::out_of_range("vector::at");
            }).find("vector::at"),
            std::string::npos);
  EXPECT_NE(agreed_message([] { throw 42; }).find("unknown type"), std::string::npos);
}

TEST(BrokenLaunch, SrunThatFellApartIsRefusedWithTheFix) {
  const Environment step = {
      {"SLURM_PROCID", "2"}, {"SLURM_NTASKS", "4"}, {"SLURM_STEP_NUM_TASKS", "4"}};
  const std::string message = broken_launch(step, 1);
  for (const char* hint :
       {"4 tasks", "task 2", "srun --mpi=list", "--mpi=pmix", "mpirun", "QSHARD_ALLOW_SINGLETON=1"})
    EXPECT_NE(message.find(hint), std::string::npos) << hint << " in: " << message;
  EXPECT_EQ(broken_launch(step, 4), "");

  Environment pmi2 = step;  // srun --mpi=pmi2 with an MPI library that does not know PMI-2
  pmi2["PMI_SIZE"] = "4";
  EXPECT_NE(broken_launch(pmi2, 1), "");
  const Environment without_step_size = {{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "4"}};
  EXPECT_NE(broken_launch(without_step_size, 1), "");
  const Environment rank_0 = {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_STEP_ID", "0"}};
  EXPECT_NE(broken_launch(rank_0, 1), "");
}

TEST(BrokenLaunch, WantedSingleRanksPass) {
  EXPECT_EQ(broken_launch({}, 1), "");
  const Environment batch_script = {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}};
  EXPECT_EQ(broken_launch(batch_script, 1), "");
  const Environment srun_of_one = {{"SLURM_PROCID", "0"},
                                   {"SLURM_NTASKS", "4"},
                                   {"SLURM_STEP_ID", "1"},
                                   {"SLURM_STEP_NUM_TASKS", "1"}};
  EXPECT_EQ(broken_launch(srun_of_one, 1), "");
  Environment allowed = {{"SLURM_PROCID", "2"}, {"SLURM_STEP_NUM_TASKS", "4"}};
  allowed["QSHARD_ALLOW_SINGLETON"] = "1";
  EXPECT_EQ(broken_launch(allowed, 1), "");
  // `mpirun -n 1` in an allocation of two nodes: the step is that of mpirun's daemons.
  const Environment mpirun = {{"SLURM_PROCID", "0"},
                              {"SLURM_NTASKS", "4"},
                              {"SLURM_STEP_NUM_TASKS", "2"},
                              {"OMPI_COMM_WORLD_SIZE", "1"}};
  EXPECT_EQ(broken_launch(mpirun, 1), "");
}

TEST(MpiErrors, ThrowWithMpisText) {
  int value = 0;
  try {
    QS_MPI(
        MPI_Bcast(&value, 1, MPI_INT, test_world().size(), test_world().comm()));  // no such root
    FAIL() << "nothing thrown";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("MPI_Bcast"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("root"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace qshard
