#include "cuda/profiler_ranges.h"

#include <fmt/format.h>
#include <nvtx3/nvToolsExt.h>

namespace qshard {
namespace {

// "linear layers.0, 6 o_proj" or "all-gather start layers.1".
std::string range_name(const Span& span) {
  return fmt::format("{} {}{}{}", span.name, span.unit, span.step.empty() ? "" : ", ", span.step);
}

class NvtxRanges final : public SpanMarks {
 public:
  explicit NvtxRanges(nvtxDomainHandle_t domain) : domain_(domain) {}

  void begin(const Span& span) override {
    const std::string name = range_name(span);
    nvtxEventAttributes_t range{};
    range.version = NVTX_VERSION;
    range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    range.messageType = NVTX_MESSAGE_TYPE_ASCII;
    range.message.ascii = name.c_str();
    nvtxDomainRangePushEx(domain_, &range);
  }
  void end() override { nvtxDomainRangePop(domain_); }

 private:
  const nvtxDomainHandle_t domain_;
};

Trace* make_profiler_trace() {
  const nvtxDomainHandle_t domain = nvtxDomainCreateA("qshard");
  if (!domain) return nullptr;
  static NvtxRanges ranges(domain);
  static Trace trace(&ranges);
  trace.record(false);
  return &trace;
}

}  // namespace

Trace* profiler_trace() {
  static Trace* const trace = make_profiler_trace();
  return trace;
}

}  // namespace qshard
