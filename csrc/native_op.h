// The native ops as the dispatcher has them, called with what they are declared with in native.h.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "native.h"

namespace sparse_opt {

struct AnyDevice;

// The registered op. The dispatcher wants the type of its kernels to the letter, which is the same for every device.
template <typename Signature>
auto native_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace sparse_opt
