// What every variant needs from outside, included before the target pragma: nothing in here may end up compiled for it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "abi.hpp"
