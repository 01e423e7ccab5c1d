// A device's stream beside that of the backward passes, for work on gradients while the next ones are made.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <mutex>
#include <optional>
#include <vector>

namespace sparse_opt {

// The gradients of one call are held at a time, whichever optimizer they are for. Thread-safe.
class GatherStream {
 public:
  // Call work() with the device's stream current, after what `made` has been given. `gradients` are held until that is
  // done for the stream `made`, whose memory they are: until the next call, or release().
  static void run(std::vector<at::Tensor> gradients, c10::Stream made, const std::function<void()>& work);
  static void release(at::Device device);

  explicit GatherStream(at::Device device);

 private:
  static GatherStream* of(at::Device device, bool make);

  struct Held {
    std::vector<at::Tensor> gradients;
    c10::Stream stream;
  };
  std::optional<Held> take_held();

  std::mutex mutex_;
  c10::Stream stream_;
  c10::Event is_made_, is_done_;
  std::optional<Held> held_;
};

}  // namespace sparse_opt
