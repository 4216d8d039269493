//! Servers of a block such as `http`, while it is read and when it is complete: their addresses and names, the default
//! server of each address, and the certificates for them and for connections to other servers.
//! (<https://nginx.org/en/docs/http/request_processing.html>)

use std::sync::{Arc, OnceLock};

use gale_config::{Diagnostic, Setting, Span, Statement, Word};
use gale_process::Resources;
use gale_process::hostname;
use gale_tls::managed::ManagedCertificate;
use gale_tls::ocsp::stapling::Stapling;
use gale_tls::settings::{AsksAbout, TlsClientSettings, TlsSettings, VerifyClient};
use gale_tls::staple::Lookup;
use gale_tls::{TlsClient, TlsClientLoader, TlsLoader, TlsServer};
use gale_worker::service::ServiceSpec;
use gale_worker::traffic::ServerZone;

use crate::configuration::{Builder, Confs, ScopeId, ServerId};
use crate::listen::{AddressDraft, Listen};
use crate::server_name::{ServerName, ServerNames};
use crate::variables::subject::Subject;
use crate::variables::template::Template;

/// A `server` block while it is read.
pub struct ServerDraft {
    /// Its scope.
    pub scope: ScopeId,
    /// Place where it begins.
    pub span: Span,
    /// Arguments of `server_name`, as written and parsed.
    pub names: Vec<(Word, ServerName)>,
    /// Its `listen` directives.
    pub listens: Vec<Listen>,
    /// Its managed certificate.
    pub managed: Option<Arc<ManagedCertificate>>,
    /// `status_zone`: its counters.
    pub zone: Option<Arc<ServerZone>>,
}

/// Servers behind one address.
#[derive(Debug)]
pub struct VirtualServers {
    /// Server for hosts without a matching name.
    pub default: ServerId,
    /// Names of all servers.
    pub names: ServerNames,
}

/// A server's certificates and rules, and its mode of `ssl_verify_client`.
pub type ServerTls = (Option<Arc<TlsServer>>, VerifyClient);

impl ServerDraft {
    /// An empty server.
    pub fn new(scope: ScopeId, span: Span) -> ServerDraft {
        ServerDraft { scope, span, names: Vec::new(), listens: Vec::new(), managed: None, zone: None }
    }

    /// Adds a `listen`.
    ///
    /// # Errors
    /// The server already listens there.
    pub fn add_listen(&mut self, listen: Listen, statement: &Statement) -> Result<(), Diagnostic> {
        if let Some(address) = self.listens.iter().find_map(|other| listen.shared_with(other)) {
            return Err(statement.error(format!("a duplicate listen {address}")));
        }
        self.listens.push(listen);
        Ok(())
    }

    /// Name of the server: the first one.
    pub fn name(&self) -> Box<[u8]> {
        self.names.first().map_or(Box::default(), |(word, _)| {
            // `.example.com` is called example.com.
            let text: &[u8] = &word.text;
            text.strip_prefix(b".").unwrap_or(text).into()
        })
    }
}

/// Parses `server_name`. Groups of its expressions become variables of the block of `S`.
///
/// # Errors
/// In nginx's words.
pub fn parse_names<S: Subject>(
    builder: &mut Builder,
    statement: &Statement,
) -> Result<Vec<(Word, ServerName)>, Diagnostic> {
    let mut names = Vec::with_capacity(statement.args.len());
    for word in &statement.args {
        if word.text.contains(&b'/') {
            let message = format!("server name \"{}\" has suspicious symbols", word.text);
            builder.note([Diagnostic::warn(message).at(word.span)]);
        }
        let mut word = word.clone();
        if word.text == "$hostname" {
            word.text = hostname().into();
        }
        // nginx stores and shows all names in lower case except expressions.
        if !word.text.starts_with(b"~") {
            word.text.make_ascii_lowercase();
        }
        let mut name = ServerName::parse(&word.text).map_err(|message| Diagnostic::emerg(message).at(word.span))?;
        if let ServerName::Regex(regex) = &mut name {
            regex.bind(|group| builder.variables::<S>().table.stored(group, Some(word.span)));
        }
        names.push((word, name));
    }
    Ok(names)
}

/// Addresses of all servers, with the servers of each. `implicit` is the `listen` of a server without one.
///
/// # Errors
/// A host is not found; options or defaults conflict.
pub fn gather_addresses(
    servers: &[ServerDraft],
    implicit: impl Fn(&ServerDraft) -> Option<Listen>,
    builder: &mut Builder,
    resources: &mut dyn Resources,
) -> Result<(Vec<AddressDraft>, Vec<VirtualServers>), Diagnostic> {
    let mut addresses = Vec::new();
    for (index, server) in servers.iter().enumerate() {
        let id = ServerId(u32::try_from(index).expect("fewer servers than 2^32"));
        let implicit = if server.listens.is_empty() { implicit(server) } else { None };
        for listen in server.listens.iter().chain(&implicit) {
            listen.add_to(&mut addresses, id, builder, resources)?;
        }
    }
    let mut virtual_servers = Vec::with_capacity(addresses.len());
    for draft in &mut addresses {
        draft.spec.reuseport = draft.spec.reuseport.min(builder.workers());
        let names = names_of(draft, servers, builder);
        let default = draft.default.map_or(draft.servers[0], |(server, _)| server);
        virtual_servers.push(VirtualServers { default, names });
    }
    Ok((addresses, virtual_servers))
}

/// Names of all servers of one address. A name of two servers belongs to the first, with nginx's warning.
fn names_of(draft: &AddressDraft, servers: &[ServerDraft], builder: &mut Builder) -> ServerNames {
    let mut names = ServerNames::default();
    for &id in &draft.servers {
        let is_unnamed = servers[id.0 as usize].names.is_empty();
        // A single server is the default, whatever the host.
        if is_unnamed && draft.servers.len() > 1 && names.insert(ServerName::Exact(Box::default()), id).is_err() {
            let message = format!("conflicting server name \"\" on {}, ignored", draft.spec.address);
            builder.note([Diagnostic::warn(message).at(servers[id.0 as usize].span)]);
        }
        for (word, name) in &servers[id.0 as usize].names {
            if names.insert(name.clone(), id).is_err() {
                let message = format!("conflicting server name \"{}\" on {}, ignored", word.text, draft.spec.address);
                builder.note([Diagnostic::warn(message).at(word.span)]);
            }
        }
    }
    names
}

/// Names, with variables, of a server's certificates and keys.
pub type CertificateNames<S> = Box<[(Template<S>, Template<S>)]>;

/// Names of certificates and keys with variables, by server.
///
/// # Errors
/// A variable is invalid.
pub fn certificate_names<S: Subject>(
    servers: &[ServerDraft],
    confs: &[Confs],
    builder: &mut Builder,
) -> Result<Vec<CertificateNames<S>>, Diagnostic> {
    let mut found = Vec::with_capacity(servers.len());
    for server in servers {
        let settings = tls_settings(server, confs).filter(|settings| settings.names_certificates());
        let words = |list: &Setting<Vec<Word>>| list.get_opt().cloned().unwrap_or_default();
        let pairs = settings.map_or(Vec::new(), |settings| {
            words(&settings.certificates).into_iter().zip(words(&settings.keys)).collect()
        });
        let mut names = Vec::with_capacity(pairs.len());
        for (certificate, key) in &pairs {
            let pair = (builder.variables::<S>().template(certificate)?, builder.variables::<S>().template(key)?);
            let directory = builder.configuration_directory.clone();
            builder.reach.reads_certificate(&directory, pair.0.known_path(), "ssl_certificate");
            builder.reach.reads_certificate(&directory, pair.1.known_path(), "ssl_certificate_key");
            names.push(pair);
        }
        found.push(names.into());
    }
    Ok(found)
}

fn tls_settings<'c>(server: &ServerDraft, confs: &'c [Confs]) -> Option<&'c TlsSettings> {
    confs[server.scope.0 as usize].iter().flatten().find_map(|conf| conf.downcast_ref::<TlsSettings>())
}

/// A protocol's parameters for the TLS settings of its servers.
#[derive(Clone, Copy)]
pub struct TlsBlock<'b> {
    /// `http`
    pub name: &'static str,
    /// The resolver of a scope.
    pub lookup: &'b dyn Fn(&Confs) -> Lookup,
}

/// Certificates and rules of each server that has some. Addresses with TLS need them.
///
/// # Errors
/// In nginx's words: a file cannot be used, or an address has no certificate.
pub fn tls_servers(
    servers: &[ServerDraft],
    confs: &[Confs],
    addresses: &[AddressDraft],
    virtual_servers: &[VirtualServers],
    block: TlsBlock<'_>,
    builder: &mut Builder,
    resources: &mut dyn Resources,
) -> Result<Vec<ServerTls>, Diagnostic> {
    let (mut loader, mut notes) = (TlsLoader::new(builder.configuration_directory.clone()), Vec::new());
    let mut found = Vec::with_capacity(servers.len());
    for server in servers {
        found.push(match tls_settings(server, confs) {
            Some(settings) => {
                let lookup = (block.lookup)(&confs[server.scope.0 as usize]);
                let tls = loader.server_with(settings, server.managed.as_ref(), &lookup, resources, &mut notes)?;
                if *settings.ocsp.get() != AsksAbout::Nothing {
                    builder.reach.connects_to_any_port("ssl_ocsp");
                }
                (tls, *settings.verify_client.get())
            }
            None => ServerTls::default(),
        });
    }
    builder.note(notes);
    builder.ticket_lifetimes.extend(found.iter().filter_map(|(tls, _)| tls.as_ref()?.ticket_lifetime()));
    let (staples, managed) = (loader.staples(), loader.managed_staples());
    if let (false, Some(first)) = (staples.is_empty() && managed.is_empty(), servers.first()) {
        builder.reach.connects_to_any_port("ssl_stapling");
        let name = format!("ssl stapling of {}", block.name);
        builder.add_service(ServiceSpec::per_process(name, Stapling { staples, managed }), first.span)?;
    }
    for (address, virtual_servers) in addresses.iter().zip(virtual_servers).filter(|(address, _)| address.ssl) {
        // Servers without certificates use the default server's, unless that only rejects handshakes.
        let default = found[virtual_servers.default.0 as usize].0.as_ref();
        let needs = match default {
            None => std::slice::from_ref(&virtual_servers.default),
            Some(default) if default.rejects() => &address.servers[..],
            Some(_) => continue,
        };
        if let Some(without) = needs.iter().find(|server| found[server.0 as usize].0.is_none()) {
            let message = "no \"ssl_certificate\" is defined for the \"listen ... ssl\" directive";
            return Err(Diagnostic::emerg(message).at(servers[without.0 as usize].span));
        }
    }
    Ok(found)
}

/// TLS settings for connections to servers, before their files are read.
pub struct TlsClientDraft {
    /// The settings.
    pub settings: TlsClientSettings,
    /// Prefix of the directives of their module.
    pub prefix: &'static str,
    /// Receives the result.
    pub client: Arc<OnceLock<Arc<TlsClient>>>,
}

impl Builder {
    /// Loads certificates and keys for connections to servers.
    ///
    /// # Errors
    /// Errors with nginx's messages.
    pub fn load_tls_clients(
        &mut self,
        drafts: Vec<TlsClientDraft>,
        resources: &mut dyn Resources,
    ) -> Result<(), Diagnostic> {
        let (mut loader, mut notes) = (TlsClientLoader::new(self.configuration_directory.clone()), Vec::new());
        for draft in drafts {
            let client = loader.client(&draft.settings, draft.prefix, resources, &mut notes)?;
            draft.client.get_or_init(|| client);
        }
        self.note(notes);
        Ok(())
    }
}
