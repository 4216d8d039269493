//! Zones of a configuration: a directive declares one, others refer to it, before or after.
//!
//! This file only resolves names; the contents of a zone belong to its module. All references to a name share one
//! [`ZoneRef`]; after the whole text was read, each is checked to be declared.

use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use bstr::{BString, ByteSlice};
use gale_base::units;
use gale_config::{Diagnostic, Span, Word};

use super::Builder;
use crate::zone::{NamedZones, Zone, ZoneError};

/// Reference to a zone, which may be declared later. `Z` is its module's value.
pub struct ZoneRef<Z>(Arc<OnceLock<Z>>);

impl<Z> ZoneRef<Z> {
    /// The declared value, if it is set.
    pub fn declared(&self) -> Option<&Z> {
        self.0.get()
    }

    /// Sets the value, unless it is set already.
    pub fn declare(&self, zone: Z) {
        let _ = self.0.set(zone);
    }

    /// `true` if both refer to the same zone.
    pub fn is(&self, other: &ZoneRef<Z>) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<Z> Clone for ZoneRef<Z> {
    fn clone(&self) -> Self {
        ZoneRef(Arc::clone(&self.0))
    }
}

impl<Z> Deref for ZoneRef<Z> {
    type Target = Z;

    /// # Panics
    /// Panics before the configuration is complete, if the zone is declared later.
    fn deref(&self) -> &Z {
        self.0.get().expect("a configuration declares every zone that it mentions")
    }
}

impl<Z> fmt::Debug for ZoneRef<Z> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ZoneRef")
    }
}

/// `NAME:SIZE`, from a directive that declares a zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneSize {
    /// Name.
    pub name: BString,
    /// Most memory, in bytes.
    pub bytes: usize,
}

/// Least size of a zone, as in nginx: eight pages.
pub const ZONE_BYTES_MIN: usize = 8 * 4096;

impl ZoneSize {
    /// Zone from a name and a size in separate words.
    ///
    /// # Errors
    /// In nginx's words: the size is invalid or too small.
    pub fn of(name: &Word, size: &Word) -> Result<ZoneSize, Diagnostic> {
        let bytes = units::parse_size(&size.text)
            .and_then(|bytes| usize::try_from(bytes).ok())
            .ok_or_else(|| Diagnostic::emerg(format!("invalid zone size \"{}\"", size.text)).at(size.span))?;
        if bytes < ZONE_BYTES_MIN {
            let error = Diagnostic::emerg(format!("zone \"{}\" is too small", name.text)).at(size.span);
            return Err(error.hint("the minimum is 32k"));
        }
        Ok(ZoneSize { name: name.text.clone(), bytes })
    }

    /// Parses the value of `zone=` in `word`.
    ///
    /// # Errors
    /// In nginx's words: the size is missing or too small.
    pub fn parse(word: &Word, text: &[u8]) -> Result<ZoneSize, Diagnostic> {
        let invalid = || {
            let hint = "a zone is written zone=NAME:SIZE, for example zone=one:10m";
            Diagnostic::emerg(format!("invalid zone size \"{}\"", word.text)).at(word.span).hint(hint)
        };
        let (name, size) = text.split_once_str(":").ok_or_else(invalid)?;
        let bytes = units::parse_size(size).and_then(|bytes| usize::try_from(bytes).ok()).ok_or_else(invalid)?;
        if bytes < ZONE_BYTES_MIN {
            let error = Diagnostic::emerg(format!("zone \"{}\" is too small", word.text)).at(word.span);
            return Err(error.hint("the minimum is 32k"));
        }
        Ok(ZoneSize { name: name.into(), bytes })
    }
}

impl ZoneSize {
    /// Value of the zone, of any type. A zone kept over a reload keeps its value; otherwise `make` creates it, with the
    /// given limit of memory.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn hold<Z: Any + Send + Sync>(
        &self,
        builder: &mut Builder,
        kind: &'static str,
        span: Span,
        make: impl FnOnce(usize) -> Z,
    ) -> Result<Arc<Z>, Diagnostic> {
        let held = builder.zones.named.get(kind, &self.name, self.bytes, b"", make);
        held.map_err(|error| match error {
            ZoneError::NoMemory => self.no_memory(span),
            ZoneError::OtherKey(_) => unreachable!("zones of this kind have no keys"),
        })
    }

    /// As [`ZoneSize::hold`], for a value that belongs to a path; `subject` begins the error about a changed path.
    ///
    /// # Errors
    /// In nginx's words: the path has changed, or there is not enough memory.
    pub fn hold_for<Z: Any + Send + Sync>(
        &self,
        builder: &mut Builder,
        kind: &'static str,
        subject: &str,
        path: &[u8],
        span: Span,
        make: impl FnOnce(usize) -> Z,
    ) -> Result<Arc<Z>, Diagnostic> {
        let held = builder.zones.named.get(kind, &self.name, self.bytes, path, make);
        held.map_err(|error| match error {
            ZoneError::NoMemory => self.no_memory(span),
            ZoneError::OtherKey(earlier) => {
                let (name, now, earlier) = (&self.name, path.as_bstr(), earlier.as_bstr());
                let message = format!(
                    "{subject} \"{name}\" uses the \"{now}\" {subject} path while previously it used the \"{earlier}\" \
                     {subject} path"
                );
                Diagnostic::emerg(message).at(span).hint("give the zone another name, or restart")
            }
        })
    }

    fn no_memory(&self, span: Span) -> Diagnostic {
        let bytes = self.bytes;
        Diagnostic::emerg(format!("mmap(MAP_ANON|MAP_SHARED, {bytes}) failed (12: Cannot allocate memory)")).at(span)
    }

    /// Counters of the zone; kept over a reload. `subject` begins the error about changed keys.
    ///
    /// # Errors
    /// In nginx's words: the keys have changed, or there is not enough memory.
    pub fn state<V: Send + 'static>(
        &self,
        builder: &mut Builder,
        kind: &'static str,
        subject: &str,
        key: &Word,
        span: Span,
    ) -> Result<Arc<Zone<V>>, Diagnostic> {
        let held = builder.zones.named.get(kind, &self.name, self.bytes, &key.text, Zone::new);
        let state: Arc<Zone<V>> = held.map_err(|error| match error {
            ZoneError::OtherKey(earlier) => {
                let (name, now, earlier) = (&self.name, &key.text, earlier.as_bstr());
                let message = format!(
                    "{subject} \"{name}\" uses the \"{now}\" key while previously it used the \"{earlier}\" key"
                );
                Diagnostic::emerg(message).at(key.span).hint("give the zone another name, or restart")
            }
            ZoneError::NoMemory => self.no_memory(span),
        })?;
        builder.zones.named.add_table(&self.name, state.clone());
        Ok(state)
    }
}

/// Zones referred to so far, and the values of declared ones.
#[derive(Default)]
pub(super) struct Zones {
    mentioned: Vec<Mentioned>,
    pub named: NamedZones,
}

struct Mentioned {
    name: BString,
    /// Directive that declares such zones.
    kind: &'static str,
    bytes: Option<usize>,
    span: Span,
    /// A `OnceLock<Z>`.
    zone: Arc<dyn Any + Send + Sync>,
}

impl Zones {
    /// The zone of this name and kind; `bytes` is set where it is declared.
    pub fn find<Z: Send + Sync + 'static>(
        &mut self,
        kind: &'static str,
        name: &[u8],
        bytes: Option<usize>,
        span: Span,
    ) -> Result<ZoneRef<Z>, Diagnostic> {
        let Some(known) = self.mentioned.iter_mut().find(|known| known.name == name) else {
            let zone = Arc::new(OnceLock::<Z>::new());
            self.mentioned.push(Mentioned { name: name.into(), kind, bytes, span, zone: zone.clone() });
            return Ok(ZoneRef(zone));
        };
        let name = name.as_bstr();
        // A directive may belong to several protocols, each with its own type.
        if known.kind != kind || !known.zone.is::<OnceLock<Z>>() {
            let message = format!("the shared memory zone \"{name}\" is already declared for a different use");
            return Err(Diagnostic::emerg(message).at(span).related("first mentioned", known.span));
        }
        match (known.bytes, bytes) {
            (Some(first), Some(bytes)) if first != bytes => {
                let message = format!(
                    "the size {bytes} of shared memory zone \"{name}\" conflicts with already declared size {first}"
                );
                return Err(Diagnostic::emerg(message).at(span).related("first declared", known.span));
            }
            (None, Some(_)) => (known.bytes, known.span) = (bytes, span),
            _ => {}
        }
        let zone = Arc::clone(&known.zone).downcast().expect("the type was checked");
        Ok(ZoneRef(zone))
    }

    /// Errors for zones that are not declared.
    pub fn undeclared(&self) -> impl Iterator<Item = Diagnostic> {
        self.mentioned.iter().filter(|zone| zone.bytes.is_none()).map(|zone| {
            let hint = format!("a zone is declared by the \"{}\" directive", zone.kind);
            Diagnostic::emerg(format!("zero size shared memory zone \"{}\"", zone.name)).at(zone.span).hint(hint)
        })
    }
}
