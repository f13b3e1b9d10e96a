// Errors. Library code throws, it never prints and never exits.
//
// Error        one rank found something wrong: main() prints it with rank and host, then aborts the
// job. AgreedError  every rank throws the same error at the same point (see collectively() in
// comm/world.h,
//              or a decision taken from reduced values): rank 0 prints it once and all ranks leave
//              cleanly.
// QS_CHECK is for what must hold; its message says what was expected, what was found and the fix.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace qshard {

// Exit codes of the program, as `qshard --help` lists them.
enum ExitCode { kExitDone = 0, kExitFailed = 1, kExitUsage = 2, kExitResume = 75 };

struct Error : std::runtime_error {
  explicit Error(const std::string& message, int exit_code = kExitFailed)
      : std::runtime_error(message), code(exit_code) {}
  int code;
};

struct AgreedError : Error {
  using Error::Error;
};

template <typename... A>
[[noreturn]] void fail(fmt::format_string<A...> format, A&&... args) {
  throw Error(fmt::format(format, std::forward<A>(args)...));
}

// A wrong option, config field or combination of them: exit code 2.
template <typename... A>
[[noreturn]] void fail_usage(fmt::format_string<A...> format, A&&... args) {
  throw Error(fmt::format(format, std::forward<A>(args)...), kExitUsage);
}

// Adds the failed expression and its place to the message.
[[noreturn]] void fail_check(const char* expression, const char* file, int line,
                             const std::string& message);

}  // namespace qshard

#define QS_CHECK(condition, ...)                                                      \
  do {                                                                                \
    if (!(condition)) [[unlikely]]                                                    \
      ::qshard::fail_check(#condition, __FILE__, __LINE__, fmt::format(__VA_ARGS__)); \
  } while (0)
