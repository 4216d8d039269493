//! Devices that pool tasks wait for, and the queues of one device.

/// The device that a task will wait for. Within a pool, tasks of one device are served in order, and no device can
/// occupy the pool alone. It is only a number to compare.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Device {
    pub(super) number: u64,
    queue: Queue,
}

/// The queues of one device. Each gets its turn and its half as if it were a device of its own. But when a device
/// hangs, all its queues hang, so its use of the reserve for other devices is counted for all of them together.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Queue {
    Own,
    Looks,
    Writes,
}

impl Queue {
    pub const ALL: [Queue; 3] = [Queue::Own, Queue::Looks, Queue::Writes];
}

impl Device {
    /// No particular device: for computations, or libraries that tell nothing. All such tasks together count as one
    /// device.
    pub const NONE: Device = Device::number(0);

    /// The device that a file lies on: `st_dev` of stat(2).
    pub const fn number(number: u64) -> Device {
        Device { number, queue: Queue::Own }
    }

    /// The number of the device, as in file metadata.
    pub const fn file_device(self) -> u64 {
        self.number
    }

    /// The queue of checks of the page cache. A check waits when the device hangs, or for the journal if it updates the
    /// file's access time.
    pub const fn looks(self) -> Device {
        Device { queue: Queue::Looks, ..self }
    }

    /// The queue of writes and of changes of names: they wait when the device has too much to write, while reads do
    /// not.
    pub const fn writes(self) -> Device {
        Device { queue: Queue::Writes, ..self }
    }

    pub(super) fn queues(self) -> impl Iterator<Item = Device> {
        Queue::ALL.into_iter().map(move |queue| Device { queue, ..self })
    }

    /// Another resource that may be slow: a server, a customer. Never equal to a device of files.
    pub const fn key(key: u64) -> Device {
        // The kernel's device numbers have 32 bits.
        Device::number(key | 1 << 63)
    }

    pub(super) fn is_of_files(self) -> bool {
        self != Device { queue: self.queue, ..Device::NONE } && self.number >> 63 == 0
    }
}
