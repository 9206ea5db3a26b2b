// Weights in float32.
#pragma once

#include "plain.h"

using Weight = PlainWeight<float>;
