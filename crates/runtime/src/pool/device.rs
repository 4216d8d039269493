//! What tasks of a pool wait for, and the queues in which those of one device stand.

/// What a task will wait for: within a pool, tasks that name the same device come one after the other, and no device
/// keeps the pool from the others. It is a number that is compared and nothing else.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Device {
    pub(super) number: u64,
    queue: Queue,
}

/// The queues in which tasks of one device stand. Each has its turn and its half as if it were a device, but when the
/// device hangs they all do: so the reserve for other devices is counted for all of them together.
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
    /// None in particular: computing, or a library that tells nothing. All such tasks together are treated as one
    /// device.
    pub const NONE: Device = Device::number(0);

    /// The device that a file lies on: `st_dev` of stat(2), [`crate::FileMetadata::device`].
    pub const fn number(number: u64) -> Device {
        Device { number, queue: Queue::Own }
    }

    /// The number that files of it have.
    pub(crate) const fn file_device(self) -> u64 {
        self.number
    }

    /// The queue of looks at what is in memory. A look waits when the device hangs, or for the journal if it writes the
    /// file's time of access.
    pub(crate) const fn looks(self) -> Device {
        Device { queue: Queue::Looks, ..self }
    }

    /// The queue of writes and of changes of names: they wait when the device has too much to write, and reads then do
    /// not.
    pub const fn writes(self) -> Device {
        Device { queue: Queue::Writes, ..self }
    }

    /// The same device, in each of its queues.
    pub(super) fn queues(self) -> impl Iterator<Item = Device> {
        Queue::ALL.into_iter().map(move |queue| Device { queue, ..self })
    }

    /// Something else that may be slow on its own: a server, a customer. Never equal to a device of files.
    pub const fn key(key: u64) -> Device {
        // The kernel's device numbers have 32 bits.
        Device::number(key | 1 << 63)
    }

    /// Whether files lie on it.
    pub(super) fn is_of_files(self) -> bool {
        self != Device { queue: self.queue, ..Device::NONE } && self.number >> 63 == 0
    }
}
