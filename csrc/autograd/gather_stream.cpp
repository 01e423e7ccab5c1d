#include "gather_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <memory>
#include <utility>

namespace sparse_opt {

// Null if the device has none and `create` is false: only a gather takes a stream from the pool.
GatherStream* GatherStream::of(at::Device device, bool create) {
  // Never destroyed: at the end of the process the device may be destroyed first.
  static auto& of_devices = *new std::map<c10::DeviceIndex, std::unique_ptr<GatherStream>>;
  static auto& mutex = *new std::mutex;
  const std::lock_guard lock(mutex);
  std::unique_ptr<GatherStream>& own = of_devices[device.index()];
  if (own == nullptr && create) own = std::make_unique<GatherStream>(device);
  return own.get();
}

GatherStream::GatherStream(at::Device device)
    : stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      source_done_(device.type()),
      work_done_(device.type()) {}

void GatherStream::run(std::vector<at::Tensor> gradients, c10::Stream source, const std::function<void()>& work) {
  GatherStream& own = *of(source.device(), /*create=*/true);
  std::optional<Held> done;
  const std::lock_guard lock(own.mutex_);
  own.source_done_.record(source);
  own.source_done_.block(own.stream_);
  {
    const c10::StreamGuard guard(own.stream_);
    work();
  }
  done = own.take_held();
  own.work_done_.record(own.stream_);
  own.held_ = {std::move(gradients), source};
}

void GatherStream::release(at::Device device) {
  GatherStream* own = of(device, /*create=*/false);
  if (own == nullptr) return;
  std::optional<Held> done;
  const std::lock_guard lock(own->mutex_);
  done = own->take_held();
}

// The caller frees the gradients after the lock is released.
std::optional<GatherStream::Held> GatherStream::take_held() {
  if (held_.has_value()) work_done_.block(held_->stream);
  return std::exchange(held_, std::nullopt);
}

}  // namespace sparse_opt
