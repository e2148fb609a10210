// What conv/steps.hpp asks of this kind of convolution.
#pragma once

#include "conv/sm90/boxes/passes.hpp"
#include "conv/sm90/boxes/rows.hpp"
#include "conv/steps.hpp"
