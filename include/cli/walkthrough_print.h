// The walkthrough's document as text for a terminal of 80 columns, or as Markdown.
#pragma once

#include <string>

#include "cli/page.h"
#include "train/ckpt_tools.h"

namespace qshard {

std::string walkthrough_text(const Document& document, const PrintStyle& style);

}  // namespace qshard
