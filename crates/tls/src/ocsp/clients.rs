//! Revocation check of client certificates (`ssl_ocsp`). It runs once, between the handshake and the first request, and
//! its result is part of the verdict.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use bstr::BString;
use gale_base::log_level::Level;
use gale_runtime::wall_seconds;
use gale_worker::Worker;
use parking_lot::Mutex;

use super::message::{self, CertificateId, CertificateStatus, Told};
use super::responder;
use crate::staple::{Lookup, Responder};
use crate::{Fault, TlsStream, Verdict, responder_of};

/// nginx's estimate of the size of an entry in a shared cache.
const ENTRY_BYTES: u64 = 256;

/// Settings of the revocation check.
pub struct OcspRules {
    /// Only the client's own certificate is checked, not the intermediate ones.
    pub leaf_only: bool,
    /// Responder to use instead of the one that the certificate names.
    pub responder: Option<Responder>,
    /// Resolver for the responder's name.
    pub lookup: Lookup,
    /// Cached responses.
    pub cache: Option<Arc<OcspCache>>,
}

/// Cache of OCSP responses: `ssl_ocsp_cache`.
pub struct OcspCache {
    entries_max: usize,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    told: HashMap<CertificateId, Told>,
    /// Oldest first.
    order: VecDeque<CertificateId>,
}

impl OcspCache {
    /// The cache of this name, which persists over reloads unless its size changes.
    pub fn shared(name: &BString, bytes: u64) -> Arc<OcspCache> {
        static CACHES: Mutex<Vec<(BString, u64, Arc<OcspCache>)>> = Mutex::new(Vec::new());
        let mut caches = CACHES.lock();
        if let Some((_, _, cache)) = caches.iter().find(|(own, size, _)| own == name && *size == bytes) {
            return Arc::clone(cache);
        }
        caches.retain(|(own, _, _)| own != name);
        let entries_max = usize::try_from(bytes / ENTRY_BYTES).unwrap_or(usize::MAX).max(1);
        let cache = Arc::new(OcspCache { entries_max, entries: Mutex::default() });
        caches.push((name.clone(), bytes, Arc::clone(&cache)));
        cache
    }

    fn find(&self, id: &CertificateId, now: u64) -> Option<CertificateStatus> {
        self.entries.lock().told.get(id).filter(|told| told.valid_until >= now).map(|told| told.status)
    }

    fn insert(&self, id: &CertificateId, told: Told) {
        let entries = &mut *self.entries.lock();
        if entries.told.insert(id.clone(), told).is_none() {
            entries.order.push_back(id.clone());
        }
        while entries.told.len() > self.entries_max {
            let Some(oldest) = entries.order.pop_front() else { break };
            entries.told.remove(&oldest);
        }
    }
}

/// Checks revocation of a client's certificate, if the server wants that and the certificate is valid otherwise.
pub async fn validate(worker: &Rc<Worker>, stream: &TlsStream, log: impl Fn(Level, &str)) {
    let chain = stream.details(|details| {
        let wants = details.server().ocsp_rules().is_some() && details.verdict() == Verdict::Good;
        wants.then(|| (Arc::clone(details.server()), details.verified_chain()))
    });
    let Some(Some((server, chain))) = chain else { return };
    let Some(rules) = server.ocsp_rules() else { return };
    for pair in chain.windows(2).take(if rules.leaf_only { 1 } else { usize::MAX }) {
        match status(worker, rules, &pair[0], &pair[1]).await {
            Ok(CertificateStatus::Good) => {}
            Ok(CertificateStatus::Revoked) => return stream.set_verdict(Verdict::Bad(Fault::RevokedByResponder)),
            Ok(CertificateStatus::Unknown) => return stream.set_verdict(Verdict::Bad(Fault::NoStatus)),
            Err(message) => {
                log(Level::Error, &format!("{message} while requesting certificate status"));
                return stream.set_verdict(Verdict::Bad(Fault::NoStatus));
            }
        }
    }
}

async fn status(
    worker: &Rc<Worker>,
    rules: &OcspRules,
    certificate: &[u8],
    issuer: &[u8],
) -> Result<CertificateStatus, String> {
    let id = CertificateId::of(certificate, issuer).ok_or("the certificate cannot be read")?;
    if let Some(known) = rules.cache.as_ref().and_then(|cache| cache.find(&id, wall_seconds())) {
        return Ok(known);
    }
    let named;
    let responder = match &rules.responder {
        Some(responder) => responder,
        None => {
            let url = responder_of(certificate).ok_or("no OCSP responder URL in certificate")?;
            named =
                Responder::parse(&url).map_err(|why| format!("{why} in OCSP responder \"{url}\" in certificate"))?;
            &named
        }
    };
    let response = responder::ask(worker, responder, &rules.lookup, &id.request()).await;
    let response = response.map_err(|error| format!("{error}, responder: {}", responder.host))?;
    let told = message::read_response(&response, &id, Some(issuer), wall_seconds())
        .map_err(|fault| format!("{fault}, responder: {}", responder.host))?;
    if let Some(cache) = &rules.cache {
        cache.insert(&id, told);
    }
    Ok(told.status)
}
