// Headers that every variant needs, included before the target pragma: nothing in here may be compiled for that target.
#pragma once
#include <cstddef>
#include <cstdint>

#include "abi.hpp"
#include "quant.hpp"
