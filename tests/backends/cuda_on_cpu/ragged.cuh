#include "system.cuh"
