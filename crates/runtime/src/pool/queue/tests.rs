//! Shares, turns and refusals, by examples and by random sequences against the invariants.

use proptest::prelude::*;

use super::*;

const A: Device = Device::number(1);
const B: Device = Device::number(2);
const C: Device = Device::number(3);

/// Pushes if there is room.
fn submit(queue: &mut FairQueue<u32>, device: Device, number: u32) -> Result<(), usize> {
    queue.admit(device)?;
    queue.push(device, number, true);
    Ok(())
}

fn submit_all(queue: &mut FairQueue<u32>, device: Device, numbers: impl IntoIterator<Item = u32>) {
    numbers.into_iter().for_each(|number| submit(queue, device, number).expect("room"));
}

fn take(queue: &mut FairQueue<u32>) -> Option<u32> {
    queue.take(|_| true).map(|taken| taken.job)
}

/// The tasks that idle threads take.
fn take_all(queue: &mut FairQueue<u32>) -> Vec<u32> {
    std::iter::from_fn(|| take(queue)).collect()
}

#[test]
fn tasks_of_one_device_come_in_order_and_devices_in_turn() {
    let mut queue = FairQueue::new(100, 0);
    submit_all(&mut queue, A, [1, 2, 3, 4]);
    submit_all(&mut queue, B, [11, 12]);
    submit_all(&mut queue, C, [21]);
    assert_eq!(take_all(&mut queue), [1, 11, 21, 2, 12, 3, 4]);
}

#[test]
fn alone_a_device_has_every_thread_and_the_whole_queue() {
    let mut queue = FairQueue::new(4, 3);
    submit_all(&mut queue, A, 0..7);
    assert_eq!(submit(&mut queue, A, 7), Err(3));
    assert_eq!(take_all(&mut queue), [0, 1, 2, 3]);
    queue.finish(A, true);
    assert_eq!(take_all(&mut queue), [4]);
}

#[test]
fn while_others_wait_a_device_has_half_of_the_threads() {
    let mut queue = FairQueue::new(4, 100);
    submit_all(&mut queue, A, 0..6);
    submit_all(&mut queue, B, 10..16);
    assert_eq!(take_all(&mut queue), [0, 10, 1, 11]);
    // B hangs. A's threads go to A again, although B waits as well.
    queue.finish(A, true);
    queue.finish(A, true);
    assert_eq!(take_all(&mut queue), [2, 3]);
}

#[test]
fn a_device_that_hangs_with_every_thread_leaves_a_reserve_of_half() {
    let mut queue = FairQueue::new(4, 100);
    submit_all(&mut queue, A, 0..10);
    assert_eq!(take_all(&mut queue), [0, 1, 2, 3]);
    assert_eq!(queue.threads_allowed(), 6);
    submit_all(&mut queue, B, 10..20);
    assert_eq!(take_all(&mut queue), [10, 11]);
    queue.finish(B, true);
    assert_eq!(take_all(&mut queue), [12]);
    submit_all(&mut queue, C, [21]);
    queue.finish(B, true);
    assert_eq!(take_all(&mut queue), [13]);
    queue.finish(B, true);
    assert_eq!(take_all(&mut queue), [21], "the others take turns in the reserve");
    // A answers: its debt is paid before any other task of it begins.
    queue.finish(A, true);
    assert_eq!((take_all(&mut queue), queue.threads_allowed()), (vec![], 5));
    queue.finish(A, true);
    assert_eq!((take_all(&mut queue), queue.threads_allowed()), (vec![], 4));
    queue.finish(A, true);
    assert_eq!(take_all(&mut queue), [4]);
}

#[test]
fn a_device_that_hangs_in_all_its_lines_leaves_the_reserve_to_others() {
    let mut queue = FairQueue::new(4, 0);
    submit_all(&mut queue, A, [0, 1]);
    submit_all(&mut queue, A.looks(), [2]);
    submit_all(&mut queue, A.writes(), [3]);
    assert_eq!(take_all(&mut queue), [0, 2, 3, 1]);
    assert_eq!((submit(&mut queue, A, 4), submit(&mut queue, A.looks(), 4)), (Err(0), Err(0)));
    submit_all(&mut queue, B, [10, 11]);
    assert_eq!(submit(&mut queue, B, 12), Err(2));
    assert_eq!((queue.threads_allowed(), take_all(&mut queue)), (6, vec![10, 11]));
    // Waiting tasks of A get nothing of the reserve.
    queue.push(A.looks(), 5, true);
    queue.finish(B, true);
    assert_eq!((take(&mut queue), queue.threads_allowed()), (None, 6));
    (0..2).for_each(|_| queue.finish(A, true));
    assert_eq!((take(&mut queue), queue.threads_allowed()), (Some(5), 5));
}

#[test]
fn writes_that_hang_leave_half_of_the_threads_to_reads_of_the_device() {
    let mut queue = FairQueue::new(4, 100);
    submit_all(&mut queue, A.writes(), 0..6);
    submit_all(&mut queue, A, 10..16);
    assert_eq!(take_all(&mut queue), [0, 10, 1, 11]);
    queue.finish(A, true);
    assert_eq!(take_all(&mut queue), [12]);
}

#[test]
fn a_queue_that_one_device_has_filled_has_room_for_others() {
    let mut queue = FairQueue::new(2, 4);
    submit_all(&mut queue, A, 0..6);
    assert_eq!(take_all(&mut queue), [0, 1]);
    assert_eq!(submit(&mut queue, A, 6), Err(4));
    submit_all(&mut queue, B, [10, 11, 12]);
    assert_eq!(submit(&mut queue, B, 13), Err(7));
    assert_eq!(submit(&mut queue, C, 20), Err(7));
}

#[test]
fn while_others_wait_a_device_has_half_of_the_queue() {
    let mut queue = FairQueue::new(2, 4);
    submit_all(&mut queue, A, [0, 1]);
    submit_all(&mut queue, B, [10]);
    submit_all(&mut queue, A, [2]);
    assert_eq!(submit(&mut queue, A, 3), Err(2));
    submit_all(&mut queue, B, [11, 12]);
    assert_eq!(submit(&mut queue, B, 13), Err(4));
}

#[test]
fn without_a_queue_there_is_room_for_as_many_as_can_run() {
    let mut queue = FairQueue::new(4, 0);
    submit_all(&mut queue, A, 0..4);
    assert_eq!(submit(&mut queue, A, 4), Err(0));
    assert_eq!(take_all(&mut queue), [0, 1, 2, 3]);
    submit_all(&mut queue, B, [10, 11]);
    assert_eq!(submit(&mut queue, B, 12), Err(2));
    assert_eq!(take_all(&mut queue), [10, 11]);
}

#[test]
fn loads_name_devices_of_files() {
    let mut queue = FairQueue::new(1, 100);
    submit_all(&mut queue, A, 0..3);
    submit_all(&mut queue, A.looks(), [3]);
    submit_all(&mut queue, Device::NONE, [4]);
    submit_all(&mut queue, Device::key(1), [5]);
    assert_eq!(take_all(&mut queue), [0]);
    let mut loads: Vec<_> = queue.device_loads().collect();
    loads.sort_unstable();
    assert_eq!(loads, [(1, 0, 1), (1, 1, 2)]);
}

#[test]
fn a_single_thread_does_one_thing_at_a_time() {
    let mut queue = FairQueue::new(1, 2);
    submit_all(&mut queue, A, 0..2);
    submit_all(&mut queue, B, [10]);
    assert_eq!((take_all(&mut queue), queue.threads_allowed()), (vec![0], 1));
    queue.finish(A, true);
    assert_eq!(take_all(&mut queue), [10]);
}

#[test]
fn uncounted_job_takes_no_room() {
    let mut queue = FairQueue::new(1, 1);
    submit_all(&mut queue, A, [0, 1]);
    queue.push(A, 2, false);
    assert_eq!((queue.jobs(), queue.waiting()), (3, 2));
    assert_eq!(submit(&mut queue, A, 3), Err(1));
    queue.discount(A);
    submit_all(&mut queue, A, [3]);
    let taken: Vec<(u32, bool)> = std::iter::from_fn(|| {
        let taken = queue.take(|&job| job == 0 || job == 3)?;
        queue.finish(taken.device, taken.counts);
        Some((taken.job, taken.counts))
    })
    .collect();
    assert_eq!(taken, [(0, true), (1, false), (2, false), (3, true)]);
    assert_eq!((queue.jobs(), queue.waiting(), queue.running(), queue.lanes.len()), (0, 0, 0, 0));
}

#[test]
fn smaller_pool_still_lends_for_threads_held_by_a_device() {
    let mut queue = FairQueue::new(8, 8);
    submit_all(&mut queue, A, 0..8);
    assert_eq!(take_all(&mut queue).len(), 8);
    queue.resize(2, 8);
    submit_all(&mut queue, B, [10, 11]);
    assert_eq!(take_all(&mut queue), [10]);
    queue.resize(16, 8);
    assert_eq!(take_all(&mut queue), [11]);
}

#[test]
fn smaller_pool_remembers_a_hanging_device_beside_another_over_its_share() {
    for b_runs in 0..20 {
        let mut queue = FairQueue::new(64, 64);
        submit_all(&mut queue, A, 0..40);
        submit_all(&mut queue, B, 100..120);
        assert_eq!(take_all(&mut queue).len(), 60);
        queue.resize(16, 8);
        // B makes progress, A does not.
        (0..20 - b_runs).for_each(|_| queue.finish(B, true));
        queue.push(C, 200, true);
        assert_eq!(take(&mut queue), (b_runs < 8).then_some(200), "{b_runs} of B run on");
        assert_eq!(queue.threads_allowed(), 48);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Submit(u64),
    Take,
    Finish(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..7u64).prop_map(Step::Submit),
        4 => Just(Step::Take),
        2 => any::<usize>().prop_map(Step::Finish),
    ];
    proptest::collection::vec(step, 1..200)
}

/// One of four devices, of which two have several queues.
fn queue_of(number: u64) -> Device {
    match number {
        4 => A.looks(),
        5 => B.looks(),
        6 => A.writes(),
        number => Device::number(number),
    }
}

/// Checks after each step: the limits hold, the order within a device is kept, and no thread is idle while a task may
/// run.
fn check(threads: usize, length: usize, steps: Vec<Step>) {
    let mut queue = FairQueue::new(threads, length);
    let mut running: Vec<Device> = Vec::new();
    let mut last_taken: HashMap<Device, u32> = HashMap::new();
    for (number, step) in (1..).zip(steps) {
        match step {
            Step::Submit(device) => {
                let _ = submit(&mut queue, queue_of(device), number);
            }
            Step::Take => {
                let could = queue.has_startable();
                let taken = queue.take(|_| true);
                assert_eq!(taken.is_some(), could);
                if let Some(Taken { job, device, .. }) = taken {
                    assert!(last_taken.insert(device, job).is_none_or(|last| last < job), "out of order");
                    running.push(device);
                }
            }
            Step::Finish(index) if !running.is_empty() => {
                let device = running.swap_remove(index % running.len());
                queue.finish(device, true);
            }
            Step::Finish(_) => {}
        }
        assert_eq!(queue.running(), running.len());
        assert!(running.len() <= threads + threads / 2, "{} run of {threads}", running.len());
        assert!(running.len() <= queue.threads_allowed());
        assert!(queue.waiting() + running.len() <= threads + length + threads / 2 + length / 2);
        assert!(queue.busy >= threads || queue.waiting() == 0 || queue.has_startable(), "a thread rests");
        let jobs: Vec<usize> = queue.lanes.values().map(|lane| lane.jobs.len()).filter(|&jobs| jobs > 0).collect();
        assert_eq!((jobs.iter().sum(), jobs.len()), (queue.jobs(), queue.turns.len()));
    }
}

proptest! {
    #[test]
    fn bounds_and_order_hold(threads in 1..9usize, length in 0..9usize, steps in steps()) {
        check(threads, length, steps);
    }

    #[test]
    fn others_always_find_half(threads in 2..9usize, length in 0..9usize, steps in steps()) {
        let mut queue = FairQueue::new(threads, length);
        // One device submits at will and never finishes anything.
        for step in steps {
            match step {
                Step::Submit(number) => {
                    let device = [A, A.looks(), A.writes()][number as usize % 3];
                    let _ = submit(&mut queue, device, 0);
                }
                _ => drop(take(&mut queue)),
            }
        }
        let half = threads / 2;
        for number in 0..half as u32 {
            prop_assert_eq!(submit(&mut queue, B, number + 1), Ok(()));
        }
        let begun = take_all(&mut queue).into_iter().filter(|&number| number > 0).count();
        prop_assert_eq!(begun, half);
    }
}
