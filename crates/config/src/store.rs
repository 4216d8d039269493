//! Stores for the values of directives: the last column of a directive table.
//!
//! | store | for |
//! |---|---|
//! | [`One`] | a value that may be written once per block |
//! | [`Many`] | a value that may be repeated; a block that sets any inherits none |
//! | [`OneWith`], [`ManyWith`] | the same, if the parser needs the builder |
//! | [`Updated`] | a value that later statements of the block extend or replace |
//! | [`Custom`] | everything else, blocks above all |
//! | [`Inert`] | a directive without effect, accepted with a warning |
//! | [`InertValue`] | the same, if nginx accepts the value |
//!
//! Invariant: a store changes only confs of its own type. For any other type `inherit` and `finish` do nothing, so that
//! one table may serve several confs of a module; `apply` panics, since the caller selects the conf by
//! [`conf_type`](Store::conf_type).

use crate::diagnostic::{Diagnostic, Reporter};
use crate::lexer;
use crate::setting::Setting;
use crate::statement::Statement;
use std::any::{Any, TypeId, type_name};

/// Stores, inherits and completes the value of a directive. `Cx` is the engine's builder.
pub trait Store<Cx>: Sync {
    /// The type of conf that [`apply`](Self::apply) expects; `()` if it accepts any.
    fn conf_type(&self) -> TypeId;

    /// Returns `true` if the directive has an effect; otherwise it is accepted with a warning.
    fn has_effect(&self) -> bool {
        true
    }

    /// Applies a statement. Its context, block and number of arguments are checked already.
    ///
    /// # Errors
    /// An error of the arguments, in nginx's words.
    ///
    /// # Panics
    /// If `conf` is not of [`conf_type`](Self::conf_type).
    fn apply(&self, conf: &mut dyn Any, cx: &mut Cx, statement: &Statement) -> Result<(), Diagnostic>;

    /// Copies the parent's value to the child, if the child has none.
    fn inherit(&self, _child: &mut dyn Any, _parent: &dyn Any) {}

    /// Sets an unset value to the default of the table.
    ///
    /// # Panics
    /// If the default cannot be parsed; a test finds that with [`Tables::problems`](crate::Tables::problems).
    fn finish(&self, _conf: &mut dyn Any, _cx: &mut Cx, _name: &'static str, _default: &'static str) {}

    /// Parses the default without storing it.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    fn check_default(&self, _cx: &mut Cx, _name: &'static str, _default: &'static str) -> Result<(), Diagnostic> {
        Ok(())
    }
}

/// Accessors of a setting within a conf. Created by [`slot!`](crate::slot).
pub struct Slot<C, T> {
    /// Returns the setting for reading.
    pub read: fn(&C) -> &Setting<T>,
    /// Returns the setting for writing.
    pub write: fn(&mut C) -> &mut Setting<T>,
}

/// Creates a [`Slot`] from a conf type and a field: `slot!(Conf, status)`.
#[macro_export]
macro_rules! slot {
    ($conf:ty, $($field:ident).+) => {
        $crate::Slot { read: |conf: &$conf| &conf.$($field).+, write: |conf: &mut $conf| &mut conf.$($field).+ }
    };
}

/// A value that may be written once per block, parsed from the statement alone.
pub struct One<C, T> {
    /// Parser; see [`values`](crate::values) for the usual ones.
    pub parse: fn(&Statement) -> Result<T, Diagnostic>,
    /// The setting that holds the value.
    pub slot: Slot<C, T>,
}

/// As [`One`], for a parser that needs the builder.
pub struct OneWith<C, T, Cx> {
    /// Parser.
    pub parse: fn(&mut Cx, &Statement) -> Result<T, Diagnostic>,
    /// The setting that holds the value.
    pub slot: Slot<C, T>,
}

/// A value that may be repeated, parsed from the statement alone. Without a default the list is empty.
pub struct Many<C, T> {
    /// Parser for one value.
    pub parse: fn(&Statement) -> Result<T, Diagnostic>,
    /// The setting that holds the list. Its span is that of the first value.
    pub slot: Slot<C, Vec<T>>,
}

/// As [`Many`], for a parser that needs the builder.
pub struct ManyWith<C, T, Cx> {
    /// Parser for one value.
    pub parse: fn(&mut Cx, &Statement) -> Result<T, Diagnostic>,
    /// The setting that holds the list. Its span is that of the first value.
    pub slot: Slot<C, Vec<T>>,
}

/// A value combined from several statements of a block, for example flags that add up. A block that sets any inherits
/// none.
pub struct Updated<C, T, Cx> {
    /// Computes the value from a statement and the value of the earlier statements of the block.
    pub parse: fn(&mut Cx, &Statement, Option<&T>) -> Result<T, Diagnostic>,
    /// The setting that holds the value. Its span is that of the first statement.
    pub slot: Slot<C, T>,
}

/// A function that handles the statement completely. Nothing is inherited or set to a default automatically.
pub struct Custom<C, Cx>(pub fn(&mut C, &mut Cx, &Statement) -> Result<(), Diagnostic>);

/// Accepts with a warning a directive that has no effect; only for directives whose absence does not change the meaning
/// of a response.
pub struct Inert;

/// As [`Inert`], but the value is checked.
pub struct InertValue<T>(pub fn(&Statement) -> Result<T, Diagnostic>);

impl<C: Any, T: Clone + 'static, Cx> Store<Cx> for One<C, T> {
    fn conf_type(&self) -> TypeId {
        TypeId::of::<C>()
    }

    fn apply(&self, conf: &mut dyn Any, _: &mut Cx, statement: &Statement) -> Result<(), Diagnostic> {
        set_once((self.slot.write)(conf_of(conf, statement)), statement, self.parse)
    }

    fn inherit(&self, child: &mut dyn Any, parent: &dyn Any) {
        self.slot.inherit(child, parent);
    }

    fn finish(&self, conf: &mut dyn Any, _: &mut Cx, name: &'static str, default: &'static str) {
        if let Some(setting) = self.slot.unset(conf)
            && !default.is_empty()
        {
            setting.set(parse_default(name, default, self.parse), None);
        }
    }

    fn check_default(&self, _: &mut Cx, name: &'static str, default: &'static str) -> Result<(), Diagnostic> {
        try_default(name, default, self.parse)
    }
}

impl<C: Any, T: Clone + 'static, Cx> Store<Cx> for OneWith<C, T, Cx> {
    fn conf_type(&self) -> TypeId {
        TypeId::of::<C>()
    }

    fn apply(&self, conf: &mut dyn Any, cx: &mut Cx, statement: &Statement) -> Result<(), Diagnostic> {
        set_once((self.slot.write)(conf_of(conf, statement)), statement, |statement| (self.parse)(cx, statement))
    }

    fn inherit(&self, child: &mut dyn Any, parent: &dyn Any) {
        self.slot.inherit(child, parent);
    }

    fn finish(&self, conf: &mut dyn Any, cx: &mut Cx, name: &'static str, default: &'static str) {
        if let Some(setting) = self.slot.unset(conf)
            && !default.is_empty()
        {
            setting.set(parse_default(name, default, |statement| (self.parse)(cx, statement)), None);
        }
    }

    fn check_default(&self, cx: &mut Cx, name: &'static str, default: &'static str) -> Result<(), Diagnostic> {
        try_default(name, default, |statement| (self.parse)(cx, statement))
    }
}

impl<C: Any, T: Clone + 'static, Cx> Store<Cx> for Many<C, T> {
    fn conf_type(&self) -> TypeId {
        TypeId::of::<C>()
    }

    fn apply(&self, conf: &mut dyn Any, _: &mut Cx, statement: &Statement) -> Result<(), Diagnostic> {
        append((self.slot.write)(conf_of(conf, statement)), statement, self.parse)
    }

    fn inherit(&self, child: &mut dyn Any, parent: &dyn Any) {
        self.slot.inherit(child, parent);
    }

    fn finish(&self, conf: &mut dyn Any, _: &mut Cx, name: &'static str, default: &'static str) {
        if let Some(setting) = self.slot.unset(conf) {
            setting.set(default_list(name, default, self.parse), None);
        }
    }

    fn check_default(&self, _: &mut Cx, name: &'static str, default: &'static str) -> Result<(), Diagnostic> {
        try_default(name, default, self.parse)
    }
}

impl<C: Any, T: Clone + 'static, Cx> Store<Cx> for ManyWith<C, T, Cx> {
    fn conf_type(&self) -> TypeId {
        TypeId::of::<C>()
    }

    fn apply(&self, conf: &mut dyn Any, cx: &mut Cx, statement: &Statement) -> Result<(), Diagnostic> {
        append((self.slot.write)(conf_of(conf, statement)), statement, |statement| (self.parse)(cx, statement))
    }

    fn inherit(&self, child: &mut dyn Any, parent: &dyn Any) {
        self.slot.inherit(child, parent);
    }

    fn finish(&self, conf: &mut dyn Any, cx: &mut Cx, name: &'static str, default: &'static str) {
        if let Some(setting) = self.slot.unset(conf) {
            setting.set(default_list(name, default, |statement| (self.parse)(cx, statement)), None);
        }
    }

    fn check_default(&self, cx: &mut Cx, name: &'static str, default: &'static str) -> Result<(), Diagnostic> {
        try_default(name, default, |statement| (self.parse)(cx, statement))
    }
}

impl<C: Any, T: Clone + 'static, Cx> Store<Cx> for Updated<C, T, Cx> {
    fn conf_type(&self) -> TypeId {
        TypeId::of::<C>()
    }

    fn apply(&self, conf: &mut dyn Any, cx: &mut Cx, statement: &Statement) -> Result<(), Diagnostic> {
        let setting = (self.slot.write)(conf_of(conf, statement));
        let value = (self.parse)(cx, statement, setting.get_opt())?;
        setting.set(value, Some(setting.span().unwrap_or(statement.span)));
        Ok(())
    }

    fn inherit(&self, child: &mut dyn Any, parent: &dyn Any) {
        self.slot.inherit(child, parent);
    }

    fn finish(&self, conf: &mut dyn Any, cx: &mut Cx, name: &'static str, default: &'static str) {
        if let Some(setting) = self.slot.unset(conf)
            && !default.is_empty()
        {
            setting.set(parse_default(name, default, |statement| (self.parse)(cx, statement, None)), None);
        }
    }

    fn check_default(&self, cx: &mut Cx, name: &'static str, default: &'static str) -> Result<(), Diagnostic> {
        try_default(name, default, |statement| (self.parse)(cx, statement, None))
    }
}

impl<C: Any, Cx> Store<Cx> for Custom<C, Cx> {
    fn conf_type(&self) -> TypeId {
        TypeId::of::<C>()
    }

    fn apply(&self, conf: &mut dyn Any, cx: &mut Cx, statement: &Statement) -> Result<(), Diagnostic> {
        (self.0)(conf_of(conf, statement), cx, statement)
    }
}

impl<Cx: Reporter> Store<Cx> for Inert {
    fn conf_type(&self) -> TypeId {
        TypeId::of::<()>()
    }

    fn has_effect(&self) -> bool {
        false
    }

    fn apply(&self, _: &mut dyn Any, cx: &mut Cx, statement: &Statement) -> Result<(), Diagnostic> {
        let message = format!("\"{}\" directive is accepted but has no effect", statement.name.text);
        cx.report(Diagnostic::warn(message).at(statement.name.span));
        Ok(())
    }
}

impl<T, Cx: Reporter> Store<Cx> for InertValue<T> {
    fn conf_type(&self) -> TypeId {
        TypeId::of::<()>()
    }

    fn has_effect(&self) -> bool {
        false
    }

    fn apply(&self, conf: &mut dyn Any, cx: &mut Cx, statement: &Statement) -> Result<(), Diagnostic> {
        (self.0)(statement)?;
        Inert.apply(conf, cx, statement)
    }
}

/// Builds the statement of a default value, with the words that an administrator would write.
pub(crate) fn default_statement(name: &str, default: &'static str) -> Result<Statement, Diagnostic> {
    let mut args = lexer::words(default.as_bytes())?;
    let mut statement = Statement::synthetic(name, Vec::new());
    for word in &mut args {
        word.span = statement.span;
    }
    statement.args = args;
    Ok(statement)
}

impl<C: Any, T: Clone> Slot<C, T> {
    fn inherit(&self, child: &mut dyn Any, parent: &dyn Any) {
        if let (Some(child), Some(parent)) = (child.downcast_mut::<C>(), parent.downcast_ref::<C>()) {
            (self.write)(child).inherit((self.read)(parent));
        }
    }

    /// Returns the setting if the conf has the right type and the setting is unset.
    fn unset<'c>(&self, conf: &'c mut dyn Any) -> Option<&'c mut Setting<T>> {
        conf.downcast_mut::<C>().map(self.write).filter(|setting| !setting.is_set())
    }
}

fn conf_of<'c, C: Any>(conf: &'c mut dyn Any, statement: &Statement) -> &'c mut C {
    let wanted = type_name::<C>();
    let name = &statement.name.text;
    conf.downcast_mut().unwrap_or_else(|| panic!("directive \"{name}\" was given another conf than {wanted}"))
}

fn set_once<T>(
    setting: &mut Setting<T>,
    statement: &Statement,
    parse: impl FnOnce(&Statement) -> Result<T, Diagnostic>,
) -> Result<(), Diagnostic> {
    if setting.is_set() {
        let duplicate = statement.directive_error("is duplicate");
        return Err(match setting.span() {
            Some(first) => duplicate.related("first set", first),
            None => duplicate,
        });
    }
    setting.set(parse(statement)?, Some(statement.span));
    Ok(())
}

fn append<T>(
    setting: &mut Setting<Vec<T>>,
    statement: &Statement,
    parse: impl FnOnce(&Statement) -> Result<T, Diagnostic>,
) -> Result<(), Diagnostic> {
    let value = parse(statement)?;
    match setting.get_mut() {
        Some(values) => values.push(value),
        None => setting.set(vec![value], Some(statement.span)),
    }
    Ok(())
}

fn default_list<T>(
    name: &str,
    default: &'static str,
    parse: impl FnOnce(&Statement) -> Result<T, Diagnostic>,
) -> Vec<T> {
    if default.is_empty() { Vec::new() } else { vec![parse_default(name, default, parse)] }
}

fn parse_default<T>(name: &str, default: &'static str, parse: impl FnOnce(&Statement) -> Result<T, Diagnostic>) -> T {
    default_statement(name, default)
        .and_then(|statement| parse(&statement))
        .unwrap_or_else(|error| panic!("the default \"{default}\" of \"{name}\" does not parse: {}", error.message))
}

fn try_default<T>(
    name: &str,
    default: &'static str,
    parse: impl FnOnce(&Statement) -> Result<T, Diagnostic>,
) -> Result<(), Diagnostic> {
    if default.is_empty() {
        return Ok(());
    }
    default_statement(name, default).and_then(|statement| parse(&statement)).map(|_| ())
}
