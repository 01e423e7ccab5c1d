// The rules that are built: SPARSE_OPT_FOR_EACH_RULE(USE) is USE(rule) for each.
#pragma once

#include "adamw.h"
#include "lion.h"
#include "sgd.h"

#define SPARSE_OPT_FOR_EACH_RULE(USE) \
  USE(AdamW)                          \
  USE(Lion)                           \
  USE(Sgd)
