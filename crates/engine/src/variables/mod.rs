//! Variables: names in the configuration, indices at run time.
//!
//! A name gets an index when the configuration is read. Its value is evaluated when it is first needed, appended
//! directly to the output, and cached only if another evaluation could have a different result.
//!
//! | of | value | kept | |---|---|---|
//! | a module ([`Variable`]) | evaluated | never: it is cheap, or changes |
//! | a directive such as `map` ([`Definition`]) | evaluated | for the subject, unless volatile |
//! | a named group, `set` | last stored value | for the subject |
//!
//! A stored value has priority over evaluation.
//!
//! The request or session that a variable describes is a [`Subject`](subject::Subject). Tables, definitions, the
//! functions of modules and [`Template`](template::Template)s are for one type of subject. An index is only valid in
//! the block that it was read in.

mod draft;
pub mod regex;
pub mod subject;
pub mod template;

use std::collections::HashMap;
use std::sync::Arc;

use bstr::BStr;
use gale_config::Span;

pub use self::draft::{HasVariables, VariablesDraft};
use crate::nginx_names;

/// Index of a variable in the configuration's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VariableId(pub u32);

/// Appends the value to the output; returns `false` if there is none. The second argument is the rest of the name of a
/// variable such as `http_NAME`.
pub type Evaluate<S> = fn(&S, &[u8], &mut Vec<u8>) -> bool;

/// Assignment by `set` to a variable that a module defines.
pub type Assign<S> = fn(&mut S, &[u8]);

/// Definition of a variable by a directive: `map`, `geo`.
pub trait Definition<S>: Send + Sync {
    /// Appends the value to the output; returns `false` if there is none.
    fn append(&self, subject: &S, out: &mut Vec<u8>) -> bool;

    /// `true` if all values are texts of the configuration, among which a subject only chooses.
    fn is_own(&self) -> bool {
        false
    }
}

/// A variable that a module defines.
pub struct Variable<S> {
    /// Name without its dollar sign; the prefix of a family (`http_`).
    pub name: &'static str,
    /// `true` for a family of all names with this prefix.
    pub is_prefix: bool,
    /// Function that evaluates it.
    pub value: Evaluate<S>,
    /// Function called by `set`, if the configuration may assign it.
    pub assign: Option<Assign<S>>,
    /// `true` if the configuration may define it as well; its values then have priority.
    pub is_changeable: bool,
    /// `true` if its value contains no `..` from a client.
    pub is_own: bool,
}

impl<S> Variable<S> {
    /// A variable with exactly this name.
    pub const fn named(name: &'static str, value: Evaluate<S>) -> Variable<S> {
        Variable { name, is_prefix: false, value, assign: None, is_changeable: false, is_own: false }
    }

    /// All variables whose names begin with `prefix`.
    pub const fn family(prefix: &'static str, value: Evaluate<S>) -> Variable<S> {
        Variable { name: prefix, is_prefix: true, value, assign: None, is_changeable: false, is_own: false }
    }

    /// Marks its value as checked: it contains no `..` from a client.
    pub const fn own(self) -> Variable<S> {
        Variable { is_own: true, ..self }
    }

    /// Lets the configuration assign it with this function.
    pub const fn assigned_by(self, assign: Assign<S>) -> Variable<S> {
        Variable { assign: Some(assign), ..self }
    }

    /// Lets the configuration replace it with its own definition by `set`, `map` and so on.
    pub const fn changeable(self) -> Variable<S> {
        Variable { is_changeable: true, ..self }
    }
}

/// `true` if a byte may be part of a variable's name.
pub fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Variables of one configuration.
pub struct VariableTable<S: 'static> {
    slots: Vec<Slot<S>>,
    by_name: HashMap<Box<[u8]>, VariableId>,
    /// Definitions of modules, for names that only appear in requests.
    definitions: Vec<&'static Variable<S>>,
}

struct Slot<S> {
    name: Box<[u8]>,
    source: Source<S>,
    mentioned_at: Option<Span>,
    /// Place where the configuration defines or assigns it.
    made_at: Option<Span>,
    /// Value until `set` assigns one; any other definition has priority.
    unset: Option<Arc<dyn Definition<S>>>,
    assign: Option<Assign<S>>,
    /// `true` if a client may influence the value.
    is_foreign: bool,
}

pub(crate) enum Source<S> {
    /// Used, but not defined yet.
    Unknown,
    /// Evaluated by a module.
    Evaluated { value: Evaluate<S>, argument: Box<[u8]> },
    /// Evaluated by a directive.
    Defined { definition: Arc<dyn Definition<S>>, is_volatile: bool },
    /// Stored at run time, for example by a named group; without a value until then.
    Stored,
}

/// Result of a look-up by name.
pub(crate) enum Found<S> {
    /// The configuration uses it.
    Mentioned(VariableId),
    /// A module defines it.
    Defined(Source<S>),
}

/// Error about a variable.
#[derive(Debug)]
pub struct VariableError {
    /// Message in nginx's words.
    pub message: String,
    /// Additional hint.
    pub hint: Option<&'static str>,
    /// Place of its first use or definition.
    pub span: Option<Span>,
}

const NOT_BUILT_YET: &str = "nginx supports this variable, Gale does not yet";

impl<S> Default for VariableTable<S> {
    fn default() -> VariableTable<S> {
        VariableTable { slots: Vec::new(), by_name: HashMap::new(), definitions: Vec::new() }
    }
}

impl<S> VariableTable<S> {
    /// Index for `name`, used at `span`. [`VariableTable::resolve`] checks that it exists.
    pub fn mention(&mut self, name: &[u8], span: Option<Span>) -> VariableId {
        // Variable names are case-insensitive in nginx.
        let name = name.to_ascii_lowercase();
        if let Some(&id) = self.by_name.get(&*name) {
            return id;
        }
        let id = VariableId(u32::try_from(self.slots.len()).expect("fewer variables than 2^32"));
        let name: Box<[u8]> = name.into();
        self.by_name.insert(name.clone(), id);
        let (source, unset, assign) = (Source::Unknown, None, None);
        self.slots.push(Slot { name, source, mentioned_at: span, made_at: None, unset, assign, is_foreign: false });
        id
    }

    /// Index for a variable that a named group sets.
    pub fn stored(&mut self, name: &[u8], span: Option<Span>) -> VariableId {
        let id = self.make(name, span);
        let slot = &mut self.slots[id.0 as usize];
        (slot.source, slot.is_foreign) = (Source::Stored, true);
        id
    }

    /// `true` if the configuration uses a variable of this name, in lower case.
    pub fn is_mentioned(&self, name: &[u8]) -> bool {
        self.by_name.contains_key(name)
    }

    /// Index for a variable that a directive defines; the last definition counts. It is evaluated once for each
    /// subject, unless it is volatile.
    pub fn define(
        &mut self,
        name: &[u8],
        span: Option<Span>,
        definition: Arc<dyn Definition<S>>,
        is_volatile: bool,
    ) -> VariableId {
        let id = self.make(name, span);
        let slot = &mut self.slots[id.0 as usize];
        slot.is_foreign |= !definition.is_own();
        slot.source = Source::Defined { definition, is_volatile };
        id
    }

    /// Index for a variable that `set` assigns. Before the first assignment its value is that of another definition, or
    /// else of `unset`. `is_own` means that the value is a text of the configuration alone.
    pub fn assigned(
        &mut self,
        name: &[u8],
        span: Option<Span>,
        unset: Arc<dyn Definition<S>>,
        is_own: bool,
    ) -> VariableId {
        let id = self.make(name, span);
        let slot = &mut self.slots[id.0 as usize];
        slot.unset = Some(unset);
        slot.is_foreign |= !is_own;
        id
    }

    fn make(&mut self, name: &[u8], span: Option<Span>) -> VariableId {
        let id = self.mention(name, span);
        self.slots[id.0 as usize].made_at = span;
        id
    }

    /// Finds the definitions of all used variables.
    pub fn resolve<'d>(
        &mut self,
        definitions: impl Iterator<Item = &'d Variable<S>> + Clone,
    ) -> Result<(), VariableError> {
        for slot in &mut self.slots {
            let is_made = slot.unset.is_some() || !matches!(slot.source, Source::Unknown);
            let own = definitions.clone().find(|own| !own.is_prefix && own.name.as_bytes() == &*slot.name);
            if let Some(own) = own.filter(|_| is_made) {
                if own.assign.is_none() && !own.is_changeable {
                    let message = format!("the duplicate \"{}\" variable", BStr::new(&slot.name));
                    return Err(VariableError { message, hint: None, span: slot.made_at });
                }
                slot.assign = own.assign;
            }
            if !matches!(slot.source, Source::Unknown) {
                continue;
            }
            let unset = slot.unset.clone();
            let unset = unset.map(|definition| Source::Defined { definition, is_volatile: false });
            slot.source = define(&slot.name, definitions.clone()).or(unset).ok_or_else(|| VariableError {
                message: format!("unknown \"{}\" variable", BStr::new(&slot.name)),
                hint: nginx_names::has_variable(&slot.name).then_some(NOT_BUILT_YET),
                span: slot.mentioned_at,
            })?;
            let is_own = definitions.clone().any(|own| own.is_own && own.name.as_bytes() == &*slot.name);
            slot.is_foreign |= matches!(slot.source, Source::Evaluated { .. }) && !is_own;
        }
        Ok(())
    }

    /// Stores the modules' definitions for [`VariableTable::find`].
    fn keep_definitions(&mut self, definitions: impl Iterator<Item = &'static Variable<S>>) {
        self.definitions = definitions.collect();
    }

    /// The variable of this name, in lower case, whether or not the configuration uses it.
    pub(crate) fn find(&self, name: &[u8]) -> Option<Found<S>> {
        match self.by_name.get(name) {
            Some(&id) => Some(Found::Mentioned(id)),
            None => define(name, self.definitions.iter().copied()).map(Found::Defined),
        }
    }

    /// `true` if the configuration uses the variable of this name.
    pub fn mentions(&self, name: &str) -> bool {
        self.by_name.contains_key(name.as_bytes())
    }

    /// Number of variables.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// `true` if there are no variables.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Name of a variable.
    pub fn name(&self, id: VariableId) -> &[u8] {
        &self.slots[id.0 as usize].name
    }

    /// `true` if all possible values of a variable are texts of the configuration.
    pub fn is_own(&self, id: VariableId) -> bool {
        !self.slots[id.0 as usize].is_foreign
    }

    pub(crate) fn source(&self, id: VariableId) -> &Source<S> {
        &self.slots[id.0 as usize].source
    }

    pub(crate) fn assign(&self, id: VariableId) -> Option<Assign<S>> {
        self.slots[id.0 as usize].assign
    }
}

/// An exact name has priority over a family, and a longer prefix over a shorter one.
fn define<'d, S: 'static>(name: &[u8], definitions: impl Iterator<Item = &'d Variable<S>>) -> Option<Source<S>> {
    let mut best: Option<&Variable<S>> = None;
    for candidate in definitions {
        if !candidate.is_prefix && candidate.name.as_bytes() == name {
            best = Some(candidate);
            break;
        }
        let is_longer = best.is_none_or(|best| best.name.len() < candidate.name.len());
        if candidate.is_prefix && name.starts_with(candidate.name.as_bytes()) && is_longer {
            best = Some(candidate);
        }
    }
    best.map(|found| Source::Evaluated {
        value: found.value,
        argument: if found.is_prefix { name[found.name.len()..].into() } else { [].into() },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(_: &(), _: &[u8], _: &mut Vec<u8>) -> bool {
        false
    }

    #[test]
    fn names_resolve_to_the_exact_definition_or_the_longest_family() {
        let definitions = [
            Variable::family("http_", nothing),
            Variable::named("http_host", nothing),
            Variable::family("http_x_", nothing),
        ];
        let mut table = VariableTable::default();
        let host = table.mention(b"HTTP_Host", None);
        let family = table.mention(b"http_x_y", None);
        assert_eq!(table.mention(b"http_host", None), host);
        table.resolve(definitions.iter()).unwrap();
        let argument = |id| match table.source(id) {
            Source::Evaluated { argument, .. } => argument.to_vec(),
            _ => panic!("not resolved"),
        };
        assert_eq!(argument(host), b"");
        assert_eq!(argument(family), b"y");
    }

    #[test]
    fn an_unknown_name_is_told() {
        let mut table = VariableTable::<()>::default();
        table.mention(b"nonsense", None);
        let error = table.resolve([].iter()).unwrap_err();
        assert_eq!(error.message, "unknown \"nonsense\" variable");
    }

    #[test]
    fn a_stored_variable_needs_no_definition() {
        let mut table = VariableTable::<()>::default();
        let id = table.mention(b"group", None);
        assert_eq!(table.stored(b"group", None), id);
        table.resolve([].iter()).unwrap();
    }

    struct Nothing;

    impl Definition<()> for Nothing {
        fn append(&self, _: &(), _: &mut Vec<u8>) -> bool {
            false
        }
    }

    #[test]
    fn only_changeable_variables_are_made_anew() {
        let definitions = [
            Variable::named("uri", nothing),
            Variable::named("args", nothing).assigned_by(|_, _| {}),
            Variable::named("msie", nothing).changeable(),
            Variable::family("http_", nothing),
        ];
        let resolve = |make: &dyn Fn(&mut VariableTable<()>) -> VariableId| {
            let mut table = VariableTable::default();
            make(&mut table);
            table.resolve(definitions.iter()).map_err(|error| error.message).map(|()| table)
        };
        let taken = Err("the duplicate \"uri\" variable".to_owned());
        assert_eq!(resolve(&|table| table.stored(b"URI", None)).map(|_| ()), taken);
        assert_eq!(resolve(&|table| table.define(b"uri", None, Arc::new(Nothing), false)).map(|_| ()), taken);
        assert_eq!(resolve(&|table| table.assigned(b"uri", None, Arc::new(Nothing), true)).map(|_| ()), taken);
        // A family supplies the value until there is another one.
        let table = resolve(&|table| table.assigned(b"http_x", None, Arc::new(Nothing), true)).ok().unwrap();
        assert!(matches!(table.source(VariableId(0)), Source::Evaluated { .. }));
        assert!(table.assign(VariableId(0)).is_none());
        let table = resolve(&|table| table.assigned(b"args", None, Arc::new(Nothing), true)).ok().unwrap();
        assert!(matches!(table.source(VariableId(0)), Source::Evaluated { .. }));
        assert!(table.assign(VariableId(0)).is_some());
        // A changeable variable supplies the value until it is stored, or is replaced.
        let table = resolve(&|table| table.assigned(b"msie", None, Arc::new(Nothing), true)).ok().unwrap();
        assert!(matches!(table.source(VariableId(0)), Source::Evaluated { .. }));
        assert!(table.assign(VariableId(0)).is_none());
        let table = resolve(&|table| table.define(b"msie", None, Arc::new(Nothing), false)).ok().unwrap();
        assert!(matches!(table.source(VariableId(0)), Source::Defined { .. }));
        let table = resolve(&|table| table.assigned(b"own", None, Arc::new(Nothing), true)).ok().unwrap();
        assert!(matches!(table.source(VariableId(0)), Source::Defined { .. }));
    }
}
