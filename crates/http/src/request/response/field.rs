//! The fields of a response's head: an ordered list, with the names as they were spelled.
//!
//! Short texts are stored inline; others may share the bytes of a received head, so an upstream's fields are passed on
//! without a copy. Known fields are found by number ([`ResponseField`]), others by name.

use std::fmt;
use std::ops::{Deref, Range};

use bstr::BStr;
use gale_base::packed::{Packer, Unpacker};
use gale_protocol::response::ResponseField;
use gale_runtime::Bytes;

/// Maximum length of an inline text.
const SHORT_MAX: usize = 46;

/// A name or value of a field.
#[derive(Clone)]
pub struct FieldText(Text);

#[derive(Clone)]
enum Text {
    Short {
        length: u8,
        bytes: [u8; SHORT_MAX],
    },
    /// A copy that does not fit inline.
    Long(Box<[u8]>),
    /// A part of shared or static bytes.
    Shared(Bytes),
}

impl FieldText {
    /// A text with static lifetime.
    pub const fn from_static(text: &'static [u8]) -> FieldText {
        FieldText(Text::Shared(Bytes::from_static(text)))
    }
}

impl Deref for FieldText {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Text::Short { length, bytes } => &bytes[..usize::from(*length)],
            Text::Long(bytes) => bytes,
            Text::Shared(bytes) => bytes,
        }
    }
}

/// Copies the text, inline if it is short.
impl From<&[u8]> for FieldText {
    #[inline]
    fn from(text: &[u8]) -> FieldText {
        let mut bytes = [0; SHORT_MAX];
        match bytes.get_mut(..text.len()) {
            Some(start) => {
                start.copy_from_slice(text);
                FieldText(Text::Short { length: text.len() as u8, bytes })
            }
            None => FieldText(Text::Long(text.into())),
        }
    }
}

impl<const N: usize> From<&[u8; N]> for FieldText {
    #[inline]
    fn from(text: &[u8; N]) -> FieldText {
        text.as_slice().into()
    }
}

/// Shares the bytes, which live as long as the field.
impl From<Bytes> for FieldText {
    fn from(text: Bytes) -> FieldText {
        FieldText(Text::Shared(text))
    }
}

impl From<Vec<u8>> for FieldText {
    fn from(text: Vec<u8>) -> FieldText {
        if text.len() <= SHORT_MAX { text.as_slice().into() } else { FieldText(Text::Long(text.into())) }
    }
}

impl From<String> for FieldText {
    fn from(text: String) -> FieldText {
        text.into_bytes().into()
    }
}

impl PartialEq for FieldText {
    fn eq(&self, other: &FieldText) -> bool {
        **self == **other
    }
}

impl Eq for FieldText {}

impl fmt::Debug for FieldText {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(BStr::new(&**self), formatter)
    }
}

/// The name of a field as it will be sent.
#[derive(Clone, Debug)]
pub struct FieldName {
    text: FieldText,
    known: Option<ResponseField>,
}

impl FieldName {
    /// The number of the field, if it is a known one.
    pub fn known(&self) -> Option<ResponseField> {
        self.known
    }

    /// True if both name the same field, ignoring case.
    pub fn is_same(&self, other: &FieldName) -> bool {
        match (self.known, other.known) {
            (None, None) => self.eq_ignore_ascii_case(other),
            (one, other) => one == other,
        }
    }
}

impl Deref for FieldName {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.text
    }
}

impl FieldText {
    /// A part of a received head: a copy if it is short, else shared.
    pub fn part_of(head: &Bytes, range: Range<usize>) -> FieldText {
        if range.len() <= SHORT_MAX { FieldText::from(&head[range]) } else { FieldText::from(head.slice(range)) }
    }
}

impl FieldText {
    /// Copies a shared text, so that it does not keep a whole head alive.
    fn detach(&mut self) {
        if let Text::Shared(bytes) = &self.0 {
            *self = FieldText::from(&**bytes);
        }
    }
}

impl FieldName {
    /// A name in a received head; `known` is the parser's result.
    pub fn part_of(head: &Bytes, range: Range<usize>, known: Option<ResponseField>) -> FieldName {
        FieldName { text: FieldText::part_of(head, range), known }
    }
}

/// Uses the usual spelling.
impl From<ResponseField> for FieldName {
    fn from(known: ResponseField) -> FieldName {
        FieldName { text: FieldText::from_static(known.name().as_bytes()), known: Some(known) }
    }
}

/// Copies a name with its spelling.
impl From<&[u8]> for FieldName {
    fn from(name: &[u8]) -> FieldName {
        FieldName { known: ResponseField::from_name(name), text: name.into() }
    }
}

impl<const N: usize> From<&[u8; N]> for FieldName {
    fn from(name: &[u8; N]) -> FieldName {
        name.as_slice().into()
    }
}

/// Shares a name with its spelling.
impl From<Bytes> for FieldName {
    fn from(name: Bytes) -> FieldName {
        FieldName { known: ResponseField::from_name(&name), text: name.into() }
    }
}

/// A field of the head.
#[derive(Clone, Debug)]
pub struct Field {
    /// The name as it will be sent.
    pub name: FieldName,
    /// The value.
    pub value: FieldText,
}

// A list may have many fields: the limit is the size of two texts of 48 bytes each and some more.
const _: () = assert!(size_of::<Field>() <= 112);

/// Fields in the order in which they are sent. Only the head that owns them changes them.
#[derive(Clone, Debug, Default)]
pub struct FieldList {
    fields: Vec<Field>,
    /// A bit for each known field that is in the list.
    present: u64,
}

impl FieldList {
    pub(super) fn clear(&mut self) {
        self.fields.clear();
        self.present = 0;
    }

    /// Frees unused capacity.
    pub(crate) fn shrink(&mut self) {
        self.fields.shrink_to_fit();
    }

    /// Packs all fields, with copies of their texts.
    pub fn pack(&self, packer: &mut Packer<'_>) {
        packer.size(self.fields.len());
        for field in &self.fields {
            packer.text(&field.name);
            packer.text(&field.value);
        }
    }

    /// Adds the packed fields.
    pub fn unpack(&mut self, unpacker: &mut Unpacker<'_>) {
        for _ in 0..unpacker.size() {
            let (name, value) = (unpacker.text(), unpacker.text());
            self.push(Field { name: name.into(), value: value.into() });
        }
    }

    /// Memory in bytes that remains allocated after `clear`.
    pub(super) fn memory_bytes(&self) -> usize {
        self.fields.capacity() * size_of::<Field>()
    }

    /// An empty list with capacity for `count` fields.
    pub fn with_capacity(count: usize) -> FieldList {
        FieldList { fields: Vec::with_capacity(count), present: 0 }
    }

    /// Adds a field at the end.
    pub fn push(&mut self, field: Field) {
        self.present |= field.name.known.map_or(0, bit);
        self.fields.push(field);
    }

    /// Copies all shared texts, so that the head that they belong to can be freed.
    pub fn detach(&mut self) {
        for field in &mut self.fields {
            field.name.text.detach();
            field.value.detach();
        }
    }

    pub(super) fn remove(&mut self, known: ResponseField) {
        if self.has(known) {
            self.fields.retain(|field| field.name.known != Some(known));
            self.present &= !bit(known);
        }
    }

    pub(super) fn remove_same(&mut self, name: &FieldName) {
        match name.known {
            Some(known) => self.remove(known),
            None => self.fields.retain(|field| !field.name.is_same(name)),
        }
    }

    /// True if there is a field of this kind.
    pub fn has(&self, known: ResponseField) -> bool {
        self.present & bit(known) != 0
    }
}

impl Deref for FieldList {
    type Target = [Field];

    fn deref(&self) -> &[Field] {
        &self.fields
    }
}

fn bit(known: ResponseField) -> u64 {
    1 << known as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_kept_in_place_or_shared() {
        for length in [0, 1, SHORT_MAX, SHORT_MAX + 1, 5000] {
            let text = vec![b'x'; length];
            let copied = FieldText::from(&*text);
            assert_eq!(matches!(copied.0, Text::Short { .. }), length <= SHORT_MAX);
            assert_eq!((&*copied, &copied), (&*text, &FieldText::from(text.clone())));
        }
        let head = Bytes::from(b"Set-Cookie: a=1; this is long enough to be a vector's memory".to_vec());
        let (name, value) = (FieldName::from(head.slice(..10)), FieldText::from(head.slice(12..)));
        assert_eq!((name.as_ptr(), value.as_ptr()), (head.as_ptr(), head[12..].as_ptr()));
        assert_eq!((name.known(), &value[..4]), (Some(ResponseField::SetCookie), &b"a=1;"[..]));
        // The field keeps the memory alive.
        drop(head);
        assert!(value.ends_with(b"memory"));
    }
}
