//! Flow-control windows: RFC 9113 §5.2 and §6.9.
//!
//! There is one for each direction of each stream and of the connection. Invariant: a window never exceeds 2³¹−1 bytes;
//! it may be negative after its initial size was changed.

use super::frame::MAX_31;

/// Default size of a window in bytes: RFC 9113 §6.9.2.
pub(super) const WINDOW_DEFAULT: u32 = 65_535;

/// Error: the window would exceed 2³¹−1 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Overflow;

/// Bytes that we may send.
#[derive(Clone, Copy, Debug)]
pub(super) struct SendWindow {
    left: i32,
}

impl SendWindow {
    pub(super) fn new(size: u32) -> Self {
        debug_assert!(size <= MAX_31);
        Self { left: size as i32 }
    }

    pub(super) fn available(self) -> usize {
        self.left.max(0) as usize
    }

    /// Charges the window for a frame of that length, which must fit.
    pub(super) fn charge(&mut self, length: usize) {
        debug_assert!(length <= self.available());
        self.left -= length as i32;
    }

    /// Opens the window, or reduces it when its initial size shrinks. Returns `true` if it was closed and is open now.
    pub(super) fn change(&mut self, by: i64) -> Result<bool, Overflow> {
        let was_closed = self.left <= 0;
        self.left = i32::try_from(i64::from(self.left) + by).map_err(|_| Overflow)?;
        Ok(was_closed && self.left > 0)
    }
}

/// Bytes that the peer may send.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReceiveWindow {
    left: i32,
    /// Released bytes not yet announced to the peer.
    returned: u32,
    /// Size to which the window is refilled.
    size: u32,
}

impl ReceiveWindow {
    pub(super) fn new(size: u32) -> Self {
        debug_assert!(size <= MAX_31);
        Self { left: size as i32, returned: 0, size }
    }

    /// Charges the window for received bytes. Returns `false` if they exceed it.
    pub(super) fn charge(&mut self, length: u32) -> bool {
        let Ok(left) = i32::try_from(i64::from(self.left) - i64::from(length)) else { return false };
        if left < 0 && length > 0 {
            return false;
        }
        self.left = left;
        true
    }

    /// Returns `true` if the peer may not send until the window is updated.
    pub(super) fn is_closed(self) -> bool {
        self.left <= 0
    }

    /// Returns processed bytes to the window.
    pub(super) fn give_back(&mut self, length: u32) {
        self.returned = self.returned.saturating_add(length).min(MAX_31);
    }

    /// Returns the increment to announce to the peer now, if any: at least half of the window, so that updates are
    /// rare.
    pub(super) fn take_update(&mut self) -> Option<u32> {
        if self.returned == 0 || self.returned < self.size / 2 {
            return None;
        }
        let increment = self.returned.min(MAX_31 - self.left.max(0) as u32);
        self.left += increment as i32;
        self.returned = 0;
        (increment > 0).then_some(increment)
    }

    /// Opens the window by `by` in addition to the returned bytes. Returns the increment to announce.
    pub(super) fn widen(&mut self, by: u32) -> u32 {
        let increment = self.returned.saturating_add(by).min(MAX_31 - self.left.max(0) as u32);
        self.left += increment as i32;
        self.returned = 0;
        increment
    }

    /// Enlarges the window; the next update announces it. A smaller size is ignored.
    pub(super) fn grow_to(&mut self, size: u32) {
        let size = size.min(MAX_31);
        if size > self.size {
            self.give_back(size - self.size);
            self.size = size;
        }
    }

    /// Changes the initial size when the peer acknowledges our SETTINGS.
    pub(super) fn change_initial(&mut self, from: u32, to: u32) {
        let left = i64::from(self.left) + i64::from(to) - i64::from(from);
        self.left = left.clamp(i64::from(i32::MIN), i64::from(MAX_31)) as i32;
        self.size = if to >= from { self.size.saturating_add(to - from).min(MAX_31) } else { self.size.min(to.max(1)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_send_window_may_be_negative_and_never_overflows() {
        let mut window = SendWindow::new(100);
        window.charge(60);
        assert_eq!(window.change(-90), Ok(false));
        assert_eq!((window.available(), window.left), (0, -50));
        assert_eq!(window.change(50), Ok(false));
        assert_eq!(window.change(1), Ok(true));
        assert_eq!(window.change(1), Ok(false));
        assert_eq!(window.change(i64::from(MAX_31) - 1), Err(Overflow));
        assert_eq!(window.available(), 2);
        assert_eq!(window.change(i64::from(MAX_31) - 2), Ok(false));
    }

    #[test]
    fn a_receive_window_is_updated_by_halves() {
        let mut window = ReceiveWindow::new(100);
        assert!(window.charge(100) && window.charge(0) && !window.charge(1));
        window.give_back(49);
        assert_eq!(window.take_update(), None);
        window.give_back(1);
        assert_eq!(window.take_update(), Some(50));
        assert!(!window.charge(51) && window.charge(50));
        window.grow_to(1000);
        window.grow_to(10);
        assert_eq!(window.take_update(), Some(900));
    }

    #[test]
    fn a_tiny_window_is_updated_too() {
        let mut window = ReceiveWindow::new(1);
        assert!(window.charge(1));
        assert_eq!(window.take_update(), None);
        window.give_back(1);
        assert_eq!(window.take_update(), Some(1));
    }
}
