//! `ssl_conf_command`, `proxy_ssl_conf_command`: commands of OpenSSL's configuration files
//! (<https://docs.openssl.org/3.5/man3/SSL_CONF_cmd/#supported-configuration-file-commands>), as far as they have a
//! counterpart here. They apply after the directives, in their order. Other commands of OpenSSL cause a warning that
//! they have no effect; unknown commands are refused.

use bstr::{BString, ByteSlice};
use gale_config::{Diagnostic, Setting, Word};

use super::settings::Versions;

/// A command with its value.
#[derive(Clone, Debug)]
pub struct Command {
    /// `Options`
    pub name: Word,
    /// `-SessionTicket`
    pub value: Word,
}

/// Commands whose value is a file name.
const OF_FILES: &[&str] = &["certificate", "privatekey"];

/// Commands of OpenSSL that have no effect here.
const WITHOUT_EFFECT: &[&str] = &[
    "signaturealgorithms",
    "clientsignaturealgorithms",
    "serverinfofile",
    "dhparameters",
    "ecdhparameters",
    "recordpadding",
    "chaincafile",
    "chaincapath",
    "chaincastore",
    "verifycafile",
    "verifycapath",
    "verifycastore",
    "requestcafile",
    "requestcapath",
    "requestcastore",
    "clientcafile",
    "clientcapath",
    "clientcastore",
    "verifymode",
    "txcertificatecompression",
    "rxcertificatecompression",
];

/// Options of OpenSSL that have no effect here.
const OPTIONS_WITHOUT_EFFECT: &[&str] = &[
    "emptyfragments",
    "bugs",
    "compression",
    "norenegotiation",
    "clientrenegotiation",
    "noresumptiononrenegotiation",
    "unsafelegacyrenegotiation",
    "unsafelegacyserverconnect",
    "ecdhsingle",
    "dhsingle",
    "encryptthenmac",
    "prioritizechacha",
    "middleboxcompat",
    "antireplay",
    "allownodhekex",
    "preferndhekex",
    "extendedmastersecret",
    "canames",
    "ktls",
    "ktlstxzerocopysendfile",
    "txcertificatecompression",
    "rxcertificatecompression",
    "strictcertcheck",
    "ignoreunexpectedeof",
];

/// Names of versions, the oldest first.
const VERSIONS: &[&str] = &["SSLv3", "TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"];

/// Settings that commands may change: first those of the directives, then the result.
#[derive(Clone, Default)]
pub(super) struct Commanded {
    pub versions: Setting<Versions>,
    pub ciphers: Setting<BString>,
    /// Suites of TLSv1.3; unset for all.
    pub suites_13: Setting<BString>,
    pub curves: Setting<BString>,
    pub prefers_own_ciphers: bool,
    pub session_tickets: bool,
    /// Tickets sent for each TLSv1.3 session; `None` for the library's default.
    pub tickets: Option<usize>,
    /// Replaces all other certificates.
    pub certificate: Option<Word>,
    pub key: Option<Word>,
}

impl Command {
    /// `true` if its value is a file name.
    pub fn is_of_file(&self) -> bool {
        OF_FILES.contains(&&*self.lower_name())
    }

    fn lower_name(&self) -> String {
        self.name.text.to_str_lossy().to_ascii_lowercase()
    }

    fn failed(&self, word: &Word, why: impl std::fmt::Display) -> Diagnostic {
        let (name, value) = (&self.name.text, &self.value.text);
        Diagnostic::emerg(format!("SSL_CONF_cmd(\"{name}\", \"{value}\") failed (SSL: {why})")).at(word.span)
    }

    fn bad_value(&self) -> Diagnostic {
        let (name, value) = (&self.name.text, &self.value.text);
        let why = format_args!("error:0A000180:SSL routines::bad value:cmd={name}, value={value}");
        self.failed(&self.value, why)
    }

    fn without_effect(&self, word: &Word, what: &str) -> Diagnostic {
        let message = format!("OpenSSL command \"{what}\" is accepted but has no effect");
        Diagnostic::warn(message).at(word.span)
    }

    fn value(&self) -> std::borrow::Cow<'_, str> {
        self.value.text.to_str_lossy()
    }
}

impl Commanded {
    /// Applies the commands. Those without effect are noted.
    ///
    /// # Errors
    /// OpenSSL's errors: an unknown command or an invalid value; also if directives and commands together leave no
    /// version enabled.
    pub fn carry_out(&mut self, commands: &[Command], notes: &mut Vec<Diagnostic>) -> Result<(), Diagnostic> {
        for command in commands {
            self.carry_out_one(command, notes)?;
        }
        let versions = self.versions.get();
        if versions.tls12 || versions.tls13 {
            return Ok(());
        }
        let message = "no supported protocol version is left";
        let error =
            commands.last().map_or_else(|| self.versions.error(message), |last| last.failed(&last.value, message));
        Err(error.hint("Gale supports TLSv1.2 and TLSv1.3"))
    }

    fn carry_out_one(&mut self, command: &Command, notes: &mut Vec<Diagnostic>) -> Result<(), Diagnostic> {
        let (value, span) = (command.value(), Some(command.value.span));
        let text = || BString::from(&*value);
        match &*command.lower_name() {
            "certificate" => self.certificate = Some(command.value.clone()),
            "privatekey" => self.key = Some(command.value.clone()),
            "cipherstring" => self.ciphers.set(text(), span),
            "ciphersuites" => self.suites_13.set(text(), span),
            "curves" | "groups" => self.curves.set(text(), span),
            "minprotocol" => self.bound_versions(command, |own, bound| own >= bound)?,
            "maxprotocol" => self.bound_versions(command, |own, bound| own <= bound)?,
            "protocol" => self.choose_versions(command)?,
            "options" => self.choose_options(command, notes)?,
            "numtickets" => self.tickets = Some(value.parse().map_err(|_| command.bad_value())?),
            known if WITHOUT_EFFECT.contains(&known) => {
                notes.push(command.without_effect(&command.name, &command.name.text.to_str_lossy()));
            }
            _ => {
                let why = format!("error:0A000182:SSL routines::unknown cmd name:cmd={}", command.name.text);
                return Err(command.failed(&command.name, why));
            }
        }
        Ok(())
    }

    fn bound_versions(
        &mut self,
        command: &Command,
        is_within: impl Fn(usize, usize) -> bool,
    ) -> Result<(), Diagnostic> {
        let value = command.value();
        if &*value == "None" {
            return Ok(());
        }
        let place = |name: &str| VERSIONS.iter().position(|known| *known == name);
        let bound = place(&value).ok_or_else(|| command.bad_value())?;
        let keeps = |name| place(name).is_some_and(|own| is_within(own, bound));
        let versions = *self.versions.get();
        let (tls12, tls13) = (versions.tls12 && keeps("TLSv1.2"), versions.tls13 && keeps("TLSv1.3"));
        self.versions.set(Versions { tls12, tls13 }, Some(command.value.span));
        Ok(())
    }

    /// Command `Protocol`: adds versions, or removes those after a minus sign.
    fn choose_versions(&mut self, command: &Command) -> Result<(), Diagnostic> {
        let mut versions = *self.versions.get();
        for word in command.value().split(',') {
            let word = word.trim();
            let (is_on, name) = signed(word);
            match name {
                "ALL" => versions = Versions { tls12: is_on, tls13: is_on },
                "TLSv1.2" => versions.tls12 = is_on,
                "TLSv1.3" => versions.tls13 = is_on,
                "SSLv2" | "SSLv3" | "TLSv1" | "TLSv1.1" | "DTLSv1" | "DTLSv1.2" => {}
                _ => return Err(command.bad_value()),
            }
        }
        self.versions.set(versions, Some(command.value.span));
        Ok(())
    }

    fn choose_options(&mut self, command: &Command, notes: &mut Vec<Diagnostic>) -> Result<(), Diagnostic> {
        for word in command.value().split(',') {
            let (is_on, name) = signed(word.trim());
            match &*name.to_ascii_lowercase() {
                "sessionticket" => self.session_tickets = is_on,
                "serverpreference" => self.prefers_own_ciphers = is_on,
                known if OPTIONS_WITHOUT_EFFECT.contains(&known) => {
                    notes.push(command.without_effect(&command.value, name));
                }
                _ => return Err(command.bad_value()),
            }
        }
        Ok(())
    }
}

/// Splits a word into its sign (`true` unless it is a minus sign) and the rest.
fn signed(word: &str) -> (bool, &str) {
    match (word.strip_prefix('-'), word.strip_prefix('+')) {
        (Some(name), _) => (false, name),
        (None, Some(name)) => (true, name),
        (None, None) => (true, word),
    }
}
