// Weights in float16.
#pragma once

#include "plain.h"

using Weight = PlainWeight<f16>;
