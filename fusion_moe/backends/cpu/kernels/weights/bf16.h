// Weights in bfloat16.
#pragma once

#include "plain.h"

using Weight = PlainWeight<bf16>;
