// The walkthrough's document as one page that needs nothing else: no network, no other file.
#pragma once

#include <string>

#include "train/ckpt_tools.h"

namespace qshard {

// The document is in the page as it is, in the script element "data".
std::string walkthrough_html(const Document& document);

}  // namespace qshard
