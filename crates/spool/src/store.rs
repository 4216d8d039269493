//! Task that writes a spool's file. It lives while the spool exists and may have to write.

use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Poll;

use gale_files::{FileError, Writer};
use gale_runtime::Bytes;

use super::state::{Next, Shared};
use super::temp_file::TempFile;

/// Creates the file and writes queued bytes until all are there.
pub(super) async fn store(spool: Weak<Shared>) {
    let spool = Storing { spool };
    if let Err(error) = fill(&spool).await {
        spool.with(|spool| spool.storage_failed(error));
    }
}

/// Weak reference to the spool: when the spool is dropped, it aborts the task.
struct Storing {
    spool: Weak<Shared>,
}

impl Storing {
    /// Calls `f` with the spool, if it still exists.
    fn with<T>(&self, f: impl FnOnce(&Shared) -> T) -> Option<T> {
        self.spool.upgrade().map(|spool| f(&spool))
    }
}

impl Storing {
    /// Releases the file if the spool's only owner is its writer, which waits for the end, so nothing can read it.
    /// A shared file would need a second descriptor to learn its size when it is finished.
    fn release_file(&self) {
        if let Some(spool) = self.spool.upgrade()
            && spool.has_writer()
            && Rc::strong_count(&spool) == 2
        {
            spool.release_file();
        }
    }
}

impl Drop for Storing {
    fn drop(&mut self) {
        // Reports a panic of the task, so that neither end waits for it.
        self.with(Shared::storage_is_gone);
    }
}

async fn fill(spool: &Storing) -> Result<(), FileError> {
    let Some((place, pool)) = spool.with(|spool| (spool.options().place.clone(), spool.pool())) else { return Ok(()) };
    let created = TempFile::create(&place, &pool).await?;
    let mut writer = Writer::new(created.file.clone(), Arc::clone(&created.path)).in_pool(&pool);
    spool.with(|spool| spool.set_file(created));
    loop {
        match poll_fn(|cx| spool.with(|spool| spool.poll_next(cx)).unwrap_or(Poll::Ready(Next::GiveUp))).await {
            Next::Write(pieces) => {
                let written = write(&mut writer, pieces).await;
                spool.with(|spool| spool.note_stored(writer.written()));
                written?;
            }
            Next::Complete => {
                spool.release_file();
                let file = writer.finish().await?;
                spool.with(|spool| spool.complete(file));
                return Ok(());
            }
            Next::GiveUp => return Ok(()),
        }
    }
}

async fn write(writer: &mut Writer, pieces: Vec<Bytes>) -> Result<(), FileError> {
    // Nothing is in flight. One call writes all pieces, because each call wakes a thread.
    poll_fn(|cx| writer.poll_ready(cx)).await?;
    writer.push_all(pieces);
    writer.flush().await
}
