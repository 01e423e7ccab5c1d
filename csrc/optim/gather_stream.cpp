#include "gather_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <memory>
#include <utility>

namespace sparse_opt {

// Null where there is none and none is made: a stream is only taken where one is wanted.
GatherStream* GatherStream::of(at::Device device, bool make) {
  // Never destroyed: at the end of the process the device may be gone before it.
  static auto& of_devices = *new std::map<c10::DeviceIndex, std::unique_ptr<GatherStream>>;
  static auto& mutex = *new std::mutex;
  const std::lock_guard lock(mutex);
  std::unique_ptr<GatherStream>& own = of_devices[device.index()];
  if (own == nullptr && make) own = std::make_unique<GatherStream>(device);
  return own.get();
}

GatherStream::GatherStream(at::Device device)
    : stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      is_made_(device.type()),
      is_done_(device.type()) {}

void GatherStream::run(std::vector<at::Tensor> gradients, c10::Stream made, const std::function<void()>& work) {
  GatherStream& own = *of(made.device(), /*make=*/true);
  std::optional<Held> done;
  const std::lock_guard lock(own.mutex_);
  own.is_made_.record(made);
  own.is_made_.block(own.stream_);
  {
    const c10::StreamGuard guard(own.stream_);
    work();
  }
  done = own.take_held();
  own.is_done_.record(own.stream_);
  own.held_ = {std::move(gradients), made};
}

void GatherStream::release(at::Device device) {
  GatherStream* own = of(device, /*make=*/false);
  if (own == nullptr) return;
  std::optional<Held> done;
  const std::lock_guard lock(own->mutex_);
  done = own->take_held();
}

// For the caller to let go when nothing is locked.
std::optional<GatherStream::Held> GatherStream::take_held() {
  if (held_.has_value()) is_done_.block(held_->stream);
  return std::exchange(held_, std::nullopt);
}

}  // namespace sparse_opt
