// Which kernels may start before those ahead of them on the stream have ended: the second of a
// program and those behind it.
//
// A kernel that starts early waits for the one ahead of it alone. One of ours has then waited for
// the one ahead of it in turn; what somebody else launched may not have, if it started early and
// had nothing to wait for. So the first kernel of a program is launched as usual.
#pragma once

namespace fusedconv {

// For as long as it lives, the launches of this thread are a program's.
class LaunchSequence {
 public:
  LaunchSequence() { state_ = State::kFirst; }
  ~LaunchSequence() { state_ = State::kNone; }
  LaunchSequence(LaunchSequence const&) = delete;
  LaunchSequence& operator=(LaunchSequence const&) = delete;

  // Asked once for each launch: whether it may start early.
  static bool follows() {
    if (state_ == State::kFirst) {
      state_ = State::kFollows;
      return false;
    }
    return state_ == State::kFollows;
  }

 private:
  enum class State { kNone, kFirst, kFollows };
  static inline thread_local State state_ = State::kNone;
};

}  // namespace fusedconv
