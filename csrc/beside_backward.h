// A device's stream beside that of the backward passes, for work on one gradient while the next one is made.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <mutex>
#include <optional>

namespace sparse_opt {

// One gradient is held at a time, whichever optimizer it is for. Thread-safe.
class BesideBackward {
 public:
  // Call work() with the device's stream current, after what `made` has been given. `gradient` is held until that is
  // done for the stream `made`, whose memory it is: until the next call, or let_go().
  static void run(const at::Tensor& gradient, c10::Stream made, const std::function<void()>& work);
  static void let_go(at::Device device);

  explicit BesideBackward(at::Device device);

 private:
  static BesideBackward* of(at::Device device, bool make);
  void let_go_locked();

  struct Held {
    at::Tensor gradient;
    c10::Stream stream;
  };
  std::mutex mutex_;
  c10::Stream stream_;
  c10::Event is_made_, is_done_;
  std::optional<Held> held_;
};

}  // namespace sparse_opt
