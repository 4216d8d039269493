//! Timers: a hierarchical wheel with a resolution of one millisecond, and `sleep` and `timeout` on top of it.
//!
//! No timer fires early. A deadline that moves later, like that of an active connection with every request, only
//! updates a field: the wheel reads the field when the old time comes and links the node anew. Nodes are linked by
//! index within one table, so arming allocates nothing once the table has grown. Each idle connection has a pending
//! timer, so both parts are small: 16 bytes of the timer, 40 of the table.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::environment::Environment;
use crate::executor::parked::Parked;
use crate::executor::slots::{Key, Slots};
use crate::time::Moment;

const TICK_NANOS: u64 = 1_000_000;
const LEVEL_BITS: u32 = 6;
const SLOTS: usize = 1 << LEVEL_BITS;
/// 2^42 ms are 139 years; later deadlines are linked there and linked anew then.
const LEVELS: usize = 7;
const HORIZON_TICKS: u64 = 1 << (LEVEL_BITS * LEVELS as u32);
const NONE: u32 = u32::MAX;

/// A deadline that a task may wait for. Unlinked when dropped.
pub struct Timer {
    state: State,
}

enum State {
    /// Never waited for yet: only the deadline.
    Apart(Moment),
    /// The node, which holds the deadline, and the environment of its wheel.
    OnWheel(Rc<Environment>, Key),
}

impl Timer {
    /// A timer without a deadline; costs nothing until it is waited for.
    pub const fn new() -> Self {
        Timer { state: State::Apart(Moment::NEVER) }
    }

    /// A timer that expires `duration` from now.
    pub fn after(duration: Duration) -> Self {
        let mut timer = Timer::new();
        timer.set_after(duration);
        timer
    }

    /// Sets or moves the deadline.
    #[inline]
    pub fn set(&mut self, deadline: Moment) {
        match &mut self.state {
            State::Apart(moment) => *moment = deadline,
            State::OnWheel(environment, key) => environment.wheel.borrow_mut().set(*key, deadline),
        }
    }

    /// Sets the deadline to `duration` from now.
    pub fn set_after(&mut self, duration: Duration) {
        self.set(crate::now() + duration);
    }

    /// Removes the deadline.
    pub fn clear(&mut self) {
        self.set(Moment::NEVER);
    }

    /// The deadline, `None` without one.
    pub fn deadline(&self) -> Option<Moment> {
        let deadline = self.moment();
        (deadline != Moment::NEVER).then_some(deadline)
    }

    fn moment(&self) -> Moment {
        match &self.state {
            State::Apart(deadline) => *deadline,
            State::OnWheel(environment, key) => environment.wheel.borrow_mut().node(*key).deadline,
        }
    }

    /// Ready once the deadline has passed, until it is set anew or cleared.
    pub fn poll_expired(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let deadline = self.moment();
        if crate::now() >= deadline {
            return Poll::Ready(());
        }
        self.arm(deadline, cx);
        Poll::Pending
    }

    /// Sets the deadline to `duration` from now and waits for it: `set_after` and `poll_expired` in one.
    pub fn poll_after(&mut self, duration: Duration, cx: &mut Context<'_>) -> Poll<()> {
        let now = crate::now();
        let deadline = now + duration;
        if now >= deadline {
            self.set(deadline);
            return Poll::Ready(());
        }
        self.arm(deadline, cx);
        Poll::Pending
    }

    fn arm(&mut self, deadline: Moment, cx: &mut Context<'_>) {
        if let State::Apart(_) = self.state {
            let environment = Environment::current();
            let key = environment.wheel.borrow_mut().insert();
            self.state = State::OnWheel(environment, key);
        }
        let State::OnWheel(environment, key) = &self.state else { unreachable!("it was just put there") };
        let displaced = environment.wheel.borrow_mut().arm(*key, deadline, cx.waker());
        drop(displaced);
    }

    /// Waits for the deadline.
    pub async fn expired(&mut self) {
        poll_fn(|cx| self.poll_expired(cx)).await;
    }
}

impl Default for Timer {
    fn default() -> Self {
        Timer::new()
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        if let State::OnWheel(environment, key) = &self.state {
            let waker = environment.wheel.borrow_mut().remove(*key);
            drop(waker);
        }
    }
}

impl fmt::Debug for Timer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Timer({:?})", self.deadline())
    }
}

/// Waits for `duration`; rounded up to whole milliseconds.
pub async fn sleep(duration: Duration) {
    Timer::after(duration).expired().await;
}

/// Waits until `deadline`.
pub async fn sleep_until(deadline: Moment) {
    let mut timer = Timer::new();
    timer.set(deadline);
    timer.expired().await;
}

/// The time given to [`timeout`] ran out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Elapsed;

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("timed out")
    }
}

impl std::error::Error for Elapsed {}

/// Runs `future` for at most `duration`, then drops it. A result that is ready at the deadline counts.
pub async fn timeout<F: Future>(duration: Duration, future: F) -> Result<F::Output, Elapsed> {
    let mut future = pin!(future);
    let mut timer = Timer::after(duration);
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(value) => Poll::Ready(Ok(value)),
        Poll::Pending => timer.poll_expired(cx).map(|()| Err(Elapsed)),
    })
    .await
}

struct Node {
    /// Time to fire.
    deadline: Moment,
    /// The list in which it is linked: `level * SLOTS + slot`. The wheel visits it when that slot begins, at or before
    /// the deadline.
    head: Option<HeadIndex>,
    previous: u32,
    next: u32,
    waker: Parked,
}

type HeadIndex = u16;

/// The wheel of one loop. Level n has 64 slots of 64^n ticks each; a node is in the level of the highest digit in which
/// its tick differs from the current one, so everything in level n comes before everything in level n+1.
pub(crate) struct Wheel {
    nodes: Slots<Node>,
    heads: [u32; SLOTS * LEVELS],
    occupied: [u64; LEVELS],
    elapsed: u64,
    linked: usize,
}

impl Wheel {
    pub fn new(now: Moment) -> Self {
        Wheel {
            nodes: Slots::new(),
            heads: [NONE; SLOTS * LEVELS],
            occupied: [0; LEVELS],
            elapsed: now.as_nanos() / TICK_NANOS,
            linked: 0,
        }
    }

    fn insert(&mut self) -> Key {
        self.nodes.insert(Node {
            deadline: Moment::NEVER,
            head: None,
            previous: NONE,
            next: NONE,
            waker: Parked::new(),
        })
    }

    fn node(&mut self, key: Key) -> &mut Node {
        self.nodes.get_mut(key).expect("a timer owns its node")
    }

    fn set(&mut self, key: Key, deadline: Moment) {
        let elapsed = self.elapsed;
        let node = self.node(key);
        let is_earlier = deadline < std::mem::replace(&mut node.deadline, deadline);
        // Moved later: the node is visited at its old time. Moved earlier: it must be linked anew. Not linked: the
        // deadline was removed while a task waits, or none waits: then the waker was taken and its task will poll
        // again.
        match node.head {
            None if deadline != Moment::NEVER && node.waker.is_some() => self.link(key.index),
            Some(head) if is_earlier && due_tick(deadline) < begin_of(head, elapsed) => {
                self.unlink(key.index);
                self.link(key.index);
            }
            _ => {}
        }
    }

    /// Links the node, to wake `waker` when it is due; returns the displaced waker, to be dropped outside of the
    /// borrow.
    fn arm(&mut self, key: Key, deadline: Moment, waker: &Waker) -> Option<Waker> {
        self.set(key, deadline);
        let node = self.node(key);
        let displaced = node.waker.park(waker);
        if node.head.is_none() && deadline != Moment::NEVER {
            self.link(key.index);
        }
        displaced
    }

    fn remove(&mut self, key: Key) -> Option<Waker> {
        if self.nodes.get_mut(key)?.head.is_some() {
            self.unlink(key.index);
        }
        self.nodes.remove(key)?.waker.take()
    }

    fn link(&mut self, index: u32) {
        let elapsed = self.elapsed;
        let node = self.nodes.at(index);
        let look = due_tick(node.deadline).clamp(elapsed + 1, elapsed + HORIZON_TICKS - 1);
        let digit = (63 - (elapsed ^ look).leading_zeros()) / LEVEL_BITS;
        // Beyond the current turn of the top level (once in 139 years of uptime): visit it when that turn ends.
        let (level, look) = match digit as usize {
            level if level < LEVELS => (level, look),
            _ => (LEVELS - 1, elapsed | (HORIZON_TICKS - 1)),
        };
        let slot = (look >> (LEVEL_BITS * level as u32)) as usize & (SLOTS - 1);
        let head = level * SLOTS + slot;
        let next = self.heads[head];
        node.head = Some(head as HeadIndex);
        node.previous = NONE;
        node.next = next;
        if next != NONE {
            self.nodes.at(next).previous = index;
        }
        self.heads[head] = index;
        self.occupied[level] |= 1 << slot;
        self.linked += 1;
    }

    fn unlink(&mut self, index: u32) {
        let node = self.nodes.at(index);
        let Some(head) = node.head.take().map(usize::from) else { return };
        let (previous, next) = (node.previous, node.next);
        if next != NONE {
            self.nodes.at(next).previous = previous;
        }
        match previous {
            NONE => self.heads[head] = next,
            previous => self.nodes.at(previous).next = next,
        }
        if self.heads[head] == NONE {
            self.occupied[head / SLOTS] &= !(1 << (head % SLOTS));
        }
        self.linked -= 1;
    }

    /// The first occupied list, and the tick at which its slot begins.
    fn first(&self) -> Option<(usize, u64)> {
        if self.linked == 0 {
            return None;
        }
        let level = self.occupied.iter().position(|&slots| slots != 0)?;
        let head = level * SLOTS + self.occupied[level].trailing_zeros() as usize;
        Some((head, begin_of(head as HeadIndex, self.elapsed)))
    }

    /// Time at which the wheel has to be advanced next, in nanoseconds of the clock. Never late; early at most once per
    /// level.
    pub fn next_look(&self) -> Option<u64> {
        self.first().map(|(_, tick)| tick * TICK_NANOS)
    }

    /// Advances the wheel to `now` and moves the wakers of all due timers to `woken`.
    pub fn advance(&mut self, now: Moment, woken: &mut Vec<Waker>) {
        let now_tick = now.as_nanos() / TICK_NANOS;
        while let Some((head, tick)) = self.first().filter(|&(_, tick)| tick <= now_tick) {
            self.elapsed = self.elapsed.max(tick);
            while self.heads[head] != NONE {
                let index = self.heads[head];
                self.unlink(index);
                let node = self.nodes.at(index);
                if due_tick(node.deadline) <= now_tick {
                    woken.extend(node.waker.take());
                } else if node.deadline != Moment::NEVER {
                    self.link(index);
                }
            }
        }
        self.elapsed = self.elapsed.max(now_tick);
    }
}

/// The tick at which the slot of a list begins. All its nodes are in the current turn of its level.
fn begin_of(head: HeadIndex, elapsed: u64) -> u64 {
    let (level, slot) = (usize::from(head) / SLOTS, usize::from(head) % SLOTS);
    let shift = LEVEL_BITS * level as u32;
    let turn_mask = (1u64 << (shift + LEVEL_BITS)) - 1;
    (elapsed & !turn_mask) + ((slot as u64) << shift)
}

/// The tick at which to fire; `u64::MAX` = not at all.
fn due_tick(deadline: Moment) -> u64 {
    match deadline {
        Moment::NEVER => u64::MAX,
        deadline => deadline.as_nanos().div_ceil(TICK_NANOS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn ticks(ticks: u64) -> Moment {
        Moment::from_nanos(ticks * TICK_NANOS)
    }

    /// Advances the wheel step by step and returns the tick at which each of `deadlines` fired.
    fn fired(start: u64, deadlines: &[u64]) -> Vec<u64> {
        let mut wheel = Wheel::new(ticks(start));
        let mut waiting = Vec::new();
        for &deadline in deadlines {
            let count = Arc::new(Count(AtomicUsize::new(0)));
            let key = wheel.insert();
            wheel.arm(key, ticks(deadline), &Waker::from(Arc::clone(&count)));
            waiting.push((count, 0));
        }
        while let Some(look) = wheel.next_look() {
            let mut woken = Vec::new();
            wheel.advance(Moment::from_nanos(look), &mut woken);
            woken.into_iter().for_each(Waker::wake);
            for (count, at) in waiting.iter_mut().filter(|(_, at)| *at == 0) {
                if count.0.load(Ordering::Relaxed) == 1 {
                    *at = look / TICK_NANOS;
                }
            }
        }
        waiting.into_iter().map(|(_, at)| at).collect()
    }

    #[test]
    fn timers_fire_at_their_tick_on_every_level() {
        for start in [1, 63, 64, 4095, 262_143, 16_777_215, 123_456_789] {
            let distances = [1, 2, 62, 63, 64, 65, 4095, 4096, 4097, 262_144, 300_000, 16_777_216, 1 << 31, 1 << 40];
            let deadlines: Vec<u64> = distances.iter().map(|distance| start + distance).collect();
            assert_eq!(fired(start, &deadlines), deadlines, "from {start}");
        }
    }

    #[test]
    fn a_deadline_in_the_past_fires_with_the_next_tick() {
        assert_eq!(fired(1000, &[5, 1000]), [1001, 1001]);
    }

    #[test]
    fn a_long_jump_fires_everything_due_and_nothing_else() {
        let mut wheel = Wheel::new(ticks(10));
        let waker = Waker::noop();
        for deadline in [20, 70, 5000, 300_000] {
            let key = wheel.insert();
            wheel.arm(key, ticks(deadline), waker);
        }
        let mut woken = Vec::new();
        wheel.advance(ticks(5000), &mut woken);
        assert_eq!(woken.len(), 3);
        wheel.advance(ticks(299_999), &mut woken);
        assert_eq!(woken.len(), 3);
        wheel.advance(ticks(300_000), &mut woken);
        assert_eq!((woken.len(), wheel.next_look()), (4, None));
    }

    #[test]
    fn deadline_removed_and_set_again_wakes_the_waiter() {
        let mut wheel = Wheel::new(ticks(0));
        let key = wheel.insert();
        wheel.arm(key, ticks(50), Waker::noop());
        wheel.set(key, Moment::NEVER);
        let mut woken = Vec::new();
        wheel.advance(ticks(60), &mut woken);
        assert_eq!((woken.len(), wheel.next_look()), (0, None));
        wheel.set(key, ticks(70));
        wheel.advance(ticks(70), &mut woken);
        assert_eq!((woken.len(), wheel.next_look()), (1, None));
        wheel.set(key, ticks(80));
        assert_eq!(wheel.next_look(), None, "who was woken polls again if it still waits");
    }

    #[test]
    fn a_deadline_moves_later_without_linking_and_earlier_with() {
        let mut wheel = Wheel::new(ticks(0));
        let key = wheel.insert();
        wheel.arm(key, ticks(50), Waker::noop());
        wheel.set(key, ticks(80));
        assert_eq!(wheel.next_look(), Some(50 * TICK_NANOS));
        let mut woken = Vec::new();
        wheel.advance(ticks(50), &mut woken);
        assert_eq!((woken.len(), wheel.next_look()), (0, Some(64 * TICK_NANOS)));
        wheel.set(key, ticks(55));
        assert_eq!(wheel.next_look(), Some(55 * TICK_NANOS));
        wheel.set(key, Moment::NEVER);
        wheel.advance(ticks(60), &mut woken);
        assert_eq!((woken.len(), wheel.next_look()), (0, None));
        wheel.remove(key);
        assert_eq!(wheel.nodes.len(), 0);
    }

    #[test]
    fn a_deadline_that_moves_within_the_slot_of_a_higher_level_stays_linked_and_fires_in_time() {
        let mut wheel = Wheel::new(ticks(0));
        let key = wheel.insert();
        wheel.arm(key, ticks(5000), Waker::noop());
        // Earlier, but after the time at which the wheel visits it.
        wheel.set(key, ticks(4200));
        assert_eq!(wheel.next_look(), Some(4096 * TICK_NANOS));
        let mut woken = Vec::new();
        wheel.advance(ticks(4199), &mut woken);
        assert_eq!((woken.len(), wheel.next_look()), (0, Some(4200 * TICK_NANOS)));
        wheel.advance(ticks(4200), &mut woken);
        assert_eq!((woken.len(), wheel.next_look()), (1, None));
    }

    #[test]
    fn a_timer_and_its_node_are_small() {
        assert_eq!((size_of::<Timer>(), Slots::<Node>::BYTES), (16, 40));
    }
}
