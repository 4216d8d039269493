//! Opens stored responses, from this worker's memory or a file, and bounds the time that a request waits for that.

use std::rc::Rc;
use std::sync::Arc;

use gale_base::log_level::Level;
use gale_files as files;
use gale_files::likely_device;
use gale_http::request::Request;
use gale_http::request::files::pool_of;
use gale_http_cache::CacheZone;
use gale_http_cache::format::VARIES;
use gale_http_cache::index::{Entry, Kind};
use gale_http_cache::key::Id;
use gale_http_cache::memory::{self, Hot, HotBody, LOOK_AGAIN};
use gale_http_cache::store::{self, OpenError};
use gale_runtime::{Moment, timeout};

use super::batches::detach_with_others;
use super::receive::announced_length;
use super::serve::Serving;
use super::{count, stored};
use crate::caching_state::Caching;

/// Reason for which an entry is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unread {
    /// The entry exists, but its disk is slow or does not answer.
    Late,
    /// The entry is gone, damaged or another one, or its disk fails.
    Unusable,
}

/// Opens an entry from this worker's memory or its file, in bounded time. As far as is known, the result can be read,
/// so its head may be sent.
pub(super) async fn open(
    request: &mut Request,
    serving: Serving<'_>,
    caching: &Caching,
    entry: &Entry,
) -> Result<Rc<Hot>, Unread> {
    let began = gale_runtime::now();
    let hot = open_entry(request, serving, caching, entry).await?;
    let HotBody::File(file, at) = &hot.body else { return Ok(hot) };
    if !request.is_head() {
        // Opening and reading together have one timeout.
        let patience = (began, *serving.settings.cache.disk_timeout.get());
        stored::begin_to_read(request, &caching.zone, &hot, (file, *at), patience).await?;
    }
    Ok(hot)
}

async fn open_entry(
    request: &Request,
    serving: Serving<'_>,
    caching: &Caching,
    entry: &Entry,
) -> Result<Rc<Hot>, Unread> {
    let zone = &caching.zone;
    let known = memory::find(zone.identity(), &caching.id);
    let is_it = |hot: &Rc<Hot>| hot.meta.number == entry.number && *hot.meta.key == *caching.key;
    if let Some(hot) = known.filter(is_it) {
        look_whether_still_there(request, zone, &caching.id, &hot);
        return Ok(hot);
    }
    match read(request, serving, caching).await {
        // A mark, which is no response: there are variants.
        Ok(hot) if hot.meta.status == VARIES => {
            memory::forget(zone.identity(), &caching.id);
            let (names, number) = (hot.meta.variant.to_vec(), hot.meta.variant_number);
            // The result does not matter, because a mark is no response in any case.
            let _ = zone.note_vary(&caching.id, &names, number, Some(hot.size), gale_runtime::wall_seconds());
            Err(Unread::Unusable)
        }
        // An old file has reappeared, by accident, in place of its replacement.
        Ok(hot) if hot.meta.number < entry.number => {
            memory::forget(zone.identity(), &caching.id);
            zone.forget(&caching.id, entry.number);
            Err(Unread::Unusable)
        }
        Ok(hot) => {
            if hot.meta.number != entry.number {
                let now = gale_runtime::wall_seconds();
                zone.put(entry_of(caching, &hot, now));
            }
            Ok(hot)
        }
        Err(NotOpened::Gone) => {
            zone.forget(&caching.id, entry.number);
            Err(Unread::Unusable)
        }
        Err(NotOpened::Failed) => Err(Unread::Unusable),
        Err(NotOpened::Late) => Err(Unread::Late),
    }
}

/// Opens a file that is not in the index yet.
pub(super) async fn open_cold(request: &Request, serving: Serving<'_>, caching: &Caching) -> Option<Rc<Hot>> {
    read(request, serving, caching).await.ok()
}

pub(super) fn entry_of(caching: &Caching, hot: &Hot, now: u64) -> Entry {
    let mut entry = Entry::new(caching.id, Kind::Stored, now);
    (entry.number, entry.size) = (hot.meta.number, caching.zone.room_for(hot.size));
    entry.set_lifetime(&hot.meta.lifetime);
    entry
}

/// Reason for which a file was not opened.
enum NotOpened {
    /// There is no usable file.
    Gone,
    /// Its disk is slow or does not answer.
    Late,
    Failed,
}

/// Reads the file.
async fn read(request: &Request, serving: Serving<'_>, caching: &Caching) -> Result<Rc<Hot>, NotOpened> {
    let zone = &caching.zone;
    let moment = gale_runtime::now();
    if !zone.disk.may_try(moment) {
        return Err(NotOpened::Late);
    }
    let path = zone.path_of(&caching.id);
    let pool = pool_of(request);
    let device = likely_device(&path);
    let task = {
        let (id, zone) = (caching.id, Arc::clone(zone));
        pool.run_for(device, move || {
            let opened = zone.disk.watch(|| zone.open(&id));
            // A file whose body was read is closed here.
            opened.map(|store::Opened { header, body, blocks, file }| match body {
                Some(bytes) => (header, HotBody::Memory(bytes), blocks),
                None => {
                    // The file may be unlinked at any time, by an eviction for example, so closing it may block.
                    file.close_in_pool();
                    let start = header.header_length.into();
                    (header, HotBody::File(file, start), blocks)
                }
            })
        })
    };
    let opened = match timeout(*serving.settings.cache.disk_timeout.get(), task).await {
        Err(_) => {
            stored::note_late(request, zone, device, moment);
            return Err(NotOpened::Late);
        }
        Ok(Err(refused)) => {
            request.log(Level::Alert, format_args!("{refused}"));
            return Err(NotOpened::Failed);
        }
        Ok(Ok(opened)) => opened,
    };
    let path = path.display();
    match opened {
        Ok((header, ..)) if *header.meta.key != *caching.key => {
            request.log(Level::Crit, format_args!("cache file \"{path}\" has md5 collision"));
            Err(NotOpened::Failed)
        }
        Ok((header, body, blocks)) => {
            let size = header.file_length();
            let fields = Rc::new(header.meta.fields.clone());
            let seen = std::cell::Cell::new(moment);
            zone.note_number(header.meta.number);
            let length = announced_length(&header.meta).unwrap_or(header.body_length);
            let hot = Rc::new(Hot {
                id: caching.id,
                meta: header.meta,
                fields,
                body,
                blocks: blocks.map(Rc::new),
                length,
                size,
                seen,
            });
            memory::keep(zone.identity(), caching.id, Rc::clone(&hot));
            Ok(hot)
        }
        Err(OpenError::Missing) => Err(NotOpened::Gone),
        Err(OpenError::Foreign) => {
            request.log(Level::Crit, format_args!("cache file \"{path}\" was not written by Gale"));
            Err(NotOpened::Gone)
        }
        Err(OpenError::Damaged(why)) => {
            count(&zone.counters.damaged);
            request.log(Level::Crit, format_args!("cache file \"{path}\" {why}"));
            Err(NotOpened::Gone)
        }
        Err(OpenError::Io(error)) => {
            count(&zone.counters.disk_errors);
            let error = gale_base::os_error::OsErrorText(&error);
            request.log(Level::Crit, format_args!("open() \"{path}\" failed {error}"));
            Err(NotOpened::Failed)
        }
    }
}

/// True if the body of an entry can be sent without waiting for its disk.
pub(super) fn is_body_at_hand(request: &Request, zone: &CacheZone, hot: &Hot) -> bool {
    match &hot.body {
        HotBody::Memory(_) => true,
        HotBody::File(file, at) => request.is_head() || stored::is_readable_now(request, zone, hot, (file, *at)),
    }
}

/// Checks now and then in a pool whether the file was removed, and then removes the entry. It does so only if that
/// cannot wait for the disk. Not on the loop: a lookup of a name holds the file for a moment, and if it is unlinked
/// just then, that thread frees its blocks.
pub(super) fn look_whether_still_there(request: &Request, zone: &Arc<CacheZone>, id: &Id, hot: &Hot) {
    let now: Moment = gale_runtime::now();
    if now.since(hot.seen.get()) < LOOK_AGAIN {
        return;
    }
    let Some(look) = zone.begin_look() else { return };
    hot.seen.set(now);
    let (path, id, number) = (zone.path_of(id), *id, hot.meta.number);
    let device = likely_device(&path);
    detach_with_others(pool_of(request), device, move || {
        if let Some(Err(error)) = files::try_stat(&path)
            && error.kind() == std::io::ErrorKind::NotFound
        {
            look.zone().forget(&id, number);
        }
    });
}
