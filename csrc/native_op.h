// Typed calls of the native ops through the dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "native.h"

namespace sparse_opt {

struct AnyDevice;

// The registered op. Signature must be exactly the type of its kernels, which is the same for every device.
template <typename Signature>
auto native_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace sparse_opt
