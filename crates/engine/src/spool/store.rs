//! The task that fills a spool's file. It lives as long as the spool is there and something may have to be written.

use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Poll;

use gale_runtime::Bytes;
use gale_runtime::files::{FileError, Writer};

use super::state::{Next, Shared};
use super::temp_file::TempFile;

/// Creates the file and writes what is queued until all of it is there.
pub(super) async fn store(spool: Weak<Shared>) {
    let spool = Storing { spool };
    if let Err(error) = fill(&spool).await {
        spool.with(|spool| spool.storage_failed(error));
    }
}

/// A spool that is being stored. It is not kept by this: it ends the task when it goes.
struct Storing {
    spool: Weak<Shared>,
}

impl Storing {
    /// Calls `f` with the spool, if it is still there.
    fn with<T>(&self, f: impl FnOnce(&Shared) -> T) -> Option<T> {
        self.spool.upgrade().map(|spool| f(&spool))
    }
}

impl Storing {
    /// Where its writer alone has the spool and waits for the end, nobody can read meanwhile. The file is then given to
    /// who finishes it: shared, it would need a second descriptor to know its size.
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
        // Nobody is left waiting for a task that has panicked.
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
    // Nothing is in flight. One call writes them all: a thread is woken for each.
    poll_fn(|cx| writer.poll_ready(cx)).await?;
    writer.push_all(pieces);
    writer.flush().await
}
