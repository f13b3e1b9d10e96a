// Token files: made from text, described, imported from other programs.
#include <chrono>
#include <limits>
#include <memory>

#include "cli/cli.h"
#include "comm/world.h"
#include "io/corpus.h"
#include "io/token_tools.h"

namespace qshard {
namespace {

constexpr const char* kFooter =
    R"(Other tokenizers: scripts/prepare_data.py writes the same format from text or JSONL files with
any Hugging Face tokenizer.json.

Examples:
  qshard data tokenize --out train.h5 --val-out val.h5 --suffix .h,.hpp /usr/include
  qshard data info train.h5 --seq 1024
  qshard data import --from fineweb_train_000001.bin --format llmc --out fineweb.h5
  qshard data import --from ids.bin --format raw-u32 --vocab-size 151936 --out ids.h5)";

struct TokenizeCommand {
  CorpusOptions corpus;
  std::string tokenizer = kByteTokenizer, out, val_out;
};

struct InfoCommand {
  std::string file, as = "auto", format = "text";
  int64_t seq = 1024;
  bool scan = false;
};

struct ImportCommand {
  std::string from, format, out;
  ImportOptions options;
};

void print_written(const TokenFileInfo& info) {
  fmt::print("{}: {} tokens, {} documents, vocabulary {}, tokenizer {}\n", info.path, info.tokens,
             info.documents, info.vocab_size, info.tokenizer);
}

void tokenize(const TokenizeCommand& c) {
  const auto start = std::chrono::steady_clock::now();
  const TokenizedCorpus done = write_byte_tokens(c.corpus, c.out, c.val_out);
  print_written(done.train);
  if (!c.val_out.empty()) print_written(done.val);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  fmt::print("{}", summary(done.counts, seconds.count()));
}

void info(const InfoCommand& c) {
  const TokenFile file(c.file, c.as);
  const nlohmann::ordered_json fields = describe_tokens(file, c.seq, c.scan);
  if (c.format == "json") {
    fmt::print("{}\n", fields.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
    return;
  }
  for (const auto& [name, value] : fields.items())
    fmt::print("{:<21} {}\n", name, value.is_string() ? value.get<std::string>() : value.dump());
  if (file.info().documents == 0 || file.info().vocab_size == 0)
    fmt::print("0 documents or vocabulary 0: not recorded in this format\n");
}

void import_file(const ImportCommand& c) {
  print_written(import_tokens(c.from, c.format, c.options, c.out));
}

// One process does the work; every rank learns how it went.
template <typename Options, typename Fn>
void set_action(CLI::App* sub, Command& run, std::shared_ptr<Options> options, Fn action) {
  sub->callback([&run, options, action] {
    run = [options, action](World& world) {
      collectively(world, [&] {
        if (world.rank() == 0) action(*options);
      });
      return kExitDone;
    };
  });
}

void add_tokenize(CLI::App& data, Command& run) {
  auto c = std::make_shared<TokenizeCommand>();
  c->corpus.val_fraction = 0.05;
  CLI::App* sub = data.add_subcommand("tokenize", "text files to tokens; token 256 ends a file");
  sub->add_option("path", c->corpus.paths, "files, and folders to search")->required();
  sub->add_option("--tokenizer", c->tokenizer, "bytes: token = byte")
      ->check(CLI::IsMember({kByteTokenizer}))
      ->capture_default_str();
  sub->add_option("--out", c->out, "token file to write (HDF5)")->required();
  sub->add_option("--val-out", c->val_out, "token file of the validation documents");
  sub->add_option("--val-fraction", c->corpus.val_fraction, "share of the documents, by name")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  sub->add_option("--max-bytes", c->corpus.max_bytes, "of text, the last file is cut; 0: no limit")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()))
      ->capture_default_str();
  sub->add_option("--suffix", c->corpus.suffixes, "of files in folders: .h,.c (default: all)")
      ->delimiter(',')
      ->allow_extra_args(false);
  set_action(sub, run, c, tokenize);
}

void add_info(CLI::App& data, Command& run) {
  auto c = std::make_shared<InfoCommand>();
  CLI::App* sub = data.add_subcommand("info", "what a token file holds");
  sub->add_option("file", c->file, "token file")->required();
  sub->add_option("--as", c->as, "auto, or raw-u16, raw-u32 for files without a header")
      ->check(CLI::IsMember({"auto", "raw-u16", "raw-u32"}))
      ->capture_default_str();
  sub->add_option("--seq", c->seq, "tokens of a sample")
      ->check(CLI::Range(1, 1 << 30))
      ->capture_default_str();
  sub->add_option("--format", c->format, "text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  sub->add_flag("--scan", c->scan, "read all tokens and report the largest id");
  set_action(sub, run, c, info);
}

void add_import(CLI::App& data, Command& run) {
  auto c = std::make_shared<ImportCommand>();
  CLI::App* sub = data.add_subcommand("import", "tokens of another program to HDF5");
  sub->add_option("--from", c->from, "file to read")->required();
  sub->add_option("--format", c->format, "llmc, raw-u16 or raw-u32")
      ->required()
      ->check(CLI::IsMember({"llmc", "raw-u16", "raw-u32"}));
  sub->add_option("--vocab-size", c->options.vocab_size,
                  "ids are below it; llmc: that of its tokenizers")
      ->check(CLI::Range(1, std::numeric_limits<int32_t>::max()));
  sub->add_option("--document-start", c->options.document_start, "id that begins each document")
      ->check(CLI::Range(0, std::numeric_limits<int32_t>::max()));
  sub->add_option("--out", c->out, "token file to write (HDF5)")->required();
  set_action(sub, run, c, import_file);
}

}  // namespace

void add_data(CLI::App& app, Command& run) {
  CLI::App* data = app.add_subcommand("data", "make, describe and import token files");
  data->require_subcommand(1);
  data->footer(kFooter);
  add_tokenize(*data, run);
  add_info(*data, run);
  add_import(*data, run);
}

}  // namespace qshard
