#include "fsdp/shard_layout.h"

#include <gtest/gtest.h>

#include "model/qwen3_params.h"
#include "train/walkthrough.h"

namespace qshard {
namespace {

std::vector<ParamSpec> params_with_rows(std::initializer_list<int64_t> rows, int64_t columns) {
  std::vector<ParamSpec> params;
  for (int64_t r : rows) params.push_back({fmt::format("w{}", r), {r, columns}});
  return params;
}

TEST(ShardLayout, RanksPartitionTheRows) {
  for (int ranks = 1; ranks <= 8; ++ranks)
    for (int64_t rows : {1, 2, 3, 4, 5, 7, 8, 11, 64, 97, 515, 151936}) {
      const UnitLayout unit({{"w", {rows, 3}}}, ranks);
      const ParamLayout& l = unit[0];
      int64_t next = 0;
      for (int r = 0; r < ranks; ++r) {
        const RowRange own = l.rows_of(r);
        EXPECT_EQ(own.begin, next) << rows << " rows, rank " << r << " of " << ranks;
        EXPECT_LE(own.size(), l.chunk);
        EXPECT_EQ(l.numel_of(r), 3 * own.size());
        if (own.size() > 0) {
          EXPECT_EQ(own.begin, r * l.chunk);  // where a gather puts them
          EXPECT_EQ(l.owner_of(own.begin), r);
          EXPECT_EQ(l.owner_of(own.end - 1), r);
        }
        next = own.end;
      }
      EXPECT_EQ(next, rows);
      EXPECT_GE(l.chunk * ranks, rows);
      EXPECT_LT((l.chunk - 1) * ranks, rows);  // no chunk larger than needed
      EXPECT_EQ(l.padded_numel(), l.chunk * ranks * 3);
    }
}

TEST(ShardLayout, UnevenAndEmptyShards) {
  const UnitLayout five({{"w", {5}}}, 4);
  EXPECT_EQ(five[0].chunk, 2);
  const int64_t sizes[] = {2, 2, 1, 0};
  for (int r = 0; r < 4; ++r) EXPECT_EQ(five[0].rows_of(r).size(), sizes[r]);
  EXPECT_EQ(five[0].padded_numel(), 8);

  const UnitLayout four({{"q_norm", {4}}}, 8);
  for (int r = 0; r < 8; ++r) EXPECT_EQ(four.shard_numel(r), r < 4 ? 1 : 0);

  // Qwen3's vocabulary on 3 ranks: 151936 = 2 · 50646 + 50644.
  const UnitLayout vocab({{"embed", {151936, 8}}}, 3);
  EXPECT_EQ(vocab[0].chunk, 50646);
  EXPECT_EQ(vocab[0].rows_of(2).size(), 50644);
}

TEST(ShardLayout, PiecesAreAlignedAndDoNotOverlap) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    const UnitLayout unit(params_with_rows({5, 1, 64, 97}, 7), ranks);
    int64_t end = 0;
    for (int i = 0; i < unit.size(); ++i) {
      const Piece piece = unit.pieces()[i];
      EXPECT_EQ(piece.offset % 32, 0);  // 64 bytes of bf16
      EXPECT_GE(piece.offset, end);
      EXPECT_EQ(piece.count * ranks, unit[i].padded_numel());
      end = piece.offset + piece.count * ranks;
    }
    EXPECT_LE(end, unit.elements());
    EXPECT_LT(unit.elements() - end, 32);
    int64_t shards = 0;
    for (int r = 0; r < ranks; ++r) shards += unit.shard_numel(r);
    EXPECT_EQ(shards, unit.numel());
    EXPECT_EQ(unit.numel(), 7 * (5 + 1 + 64 + 97));
  }
}

TEST(ShardLayout, TableOfTheWalkthroughLayer) {
  const UnitLayout unit(layer_params(walkthrough_config(), 0), 4);
  ASSERT_EQ(unit.size(), kLayerParams);
  const int64_t shard[kLayerParams] = {128,   65536, 32768,  32768,  16,    16,
                                       65536, 128,   131072, 131072, 131072};
  for (int r = 0; r < 4; ++r) {
    for (int i = 0; i < kLayerParams; ++i)
      EXPECT_EQ(unit[i].numel_of(r), shard[i]) << unit.params()[i].name;
    EXPECT_EQ(unit.shard_numel(r), 590112);
  }
  EXPECT_EQ(unit.numel(), 2360448);
  EXPECT_EQ(unit[kKProj].rows_of(1).begin, 64);
  EXPECT_EQ(unit.params()[kDownProj].name, "model.layers.0.mlp.down_proj.weight");
}

TEST(ShardLayout, WalkthroughLayerOnOtherRanks) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    const UnitLayout unit(layer_params(walkthrough_config(), 0), ranks);
    int64_t total = 0;
    for (int r = 0; r < ranks; ++r) total += unit.shard_numel(r);
    EXPECT_EQ(total, 2360448);
    // Every dimension 0 is a multiple of 64: no padding on 1, 2, 4 and 8 ranks.
    if ((ranks & (ranks - 1)) == 0) {
      EXPECT_EQ(unit.shard_numel(0), 2360448 / ranks);
    }
    if (ranks == 3) {
      EXPECT_GT(unit.shard_numel(0), 2360448 / 3);
    }
  }
}

// q/k/v and gate/up run as one product when nothing lies between them.
TEST(ShardLayout, ProjectionsOfOneInputAreAdjacentWhenRowsDivide) {
  const UnitLayout unit(layer_params(walkthrough_config(), 0), 4);
  for (auto [first, second] : {std::pair(kQProj, kKProj), {kKProj, kVProj}, {kGateProj, kUpProj}})
    EXPECT_EQ(unit[first].offset + unit[first].padded_numel(), unit[second].offset);
}

}  // namespace
}  // namespace qshard
