// All families of kernels.
#pragma once

#include "core/kernels/adam.h"
#include "core/kernels/bytes.h"
#include "core/kernels/lamb.h"
#include "core/kernels/lion.h"
#include "core/kernels/momentum.h"
#include "core/kernels/norms.h"
#include "core/kernels/onebit.h"
#include "core/kernels/onebit_lamb.h"
#include "core/kernels/outer.h"
#include "core/kernels/quant.h"
#include "core/kernels/reduce.h"
#include "core/kernels/sgd.h"
#include "core/kernels/sparse.h"
#include "core/kernels/zeroone.h"
