//! Task that writes the bytes beyond a spill queue's memory. It starts with the first write and ends with the queue,
//! with the queue's writer, or when the disk fails.

use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Poll;

use gale_files::{FileError, Writer};
use gale_runtime::Bytes;

use super::state::{Next, Shared};
use crate::temp_file::TempFile;

/// Creates the file and writes until nothing is left to write.
pub(super) async fn store(queue: Weak<Shared>) {
    let queue = Storing { queue };
    if let Err(error) = fill(&queue).await {
        queue.with(|queue| queue.storage_failed(error));
    }
}

/// Weak reference to the queue: when the queue is dropped, it aborts the task.
struct Storing {
    queue: Weak<Shared>,
}

impl Storing {
    /// Calls `f` with the queue, if it still exists.
    fn with<T>(&self, f: impl FnOnce(&Rc<Shared>) -> T) -> Option<T> {
        self.queue.upgrade().map(|queue| f(&queue))
    }
}

impl Drop for Storing {
    fn drop(&mut self) {
        // Reports a panic of the task, so that neither end waits for it.
        self.with(|queue| queue.storage_is_gone());
    }
}

async fn fill(queue: &Storing) -> Result<(), FileError> {
    let Some((place, pool)) = queue.with(|queue| (queue.options().place.clone(), queue.pool())) else { return Ok(()) };
    let created = TempFile::create(&place, &pool).await?;
    let mut writer = Writer::new(created.file.clone(), Arc::clone(&created.path)).in_pool(&pool);
    queue.with(|queue| queue.set_file(created));
    loop {
        match poll_fn(|cx| queue.with(|queue| queue.poll_write(cx)).unwrap_or(Poll::Ready(Next::GiveUp))).await {
            Next::Write { pieces, from_start } => {
                if from_start {
                    writer.restart().await?;
                }
                let before = writer.written();
                let written = write(&mut writer, pieces).await;
                queue.with(|queue| queue.note_stored(writer.written() - before));
                written?;
            }
            Next::GiveUp => {
                queue.with(|queue| queue.storage_ended());
                return Ok(());
            }
        }
    }
}

async fn write(writer: &mut Writer, pieces: Vec<Bytes>) -> Result<(), FileError> {
    // Nothing is in flight. One call writes all pieces, because each call wakes a thread.
    poll_fn(|cx| writer.poll_ready(cx)).await?;
    writer.push_all(pieces);
    writer.flush().await
}
