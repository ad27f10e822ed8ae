-- Roles of the ledger in PostgreSQL, for a schema `wherry` that its owner has made (`wherry ledger check` as the owner).
--   psql -v ON_ERROR_STOP=1 -d DATABASE -f infra/postgres/roles.sql
-- Run it first as a superuser or an owner with CREATEROLE, and again as the owner to take back what was added. Then make a
-- login for each process and give it one role: CREATE ROLE nightly LOGIN PASSWORD '…' IN ROLE wherry_worker;
-- If PUBLIC may not connect: GRANT CONNECT ON DATABASE … TO wherry_auditor, wherry_worker, wherry_registrar;
-- Roles cannot alter or delete rows of `statement`, `edge`, `conversion` and `checkpoint`; triggers also refuse it to the
-- owner for the first two. Each role appends only statements of its work: a worker none about model versions, and only the
-- owner one about a rebuild.

DO $$
DECLARE
  role text;
  has record;
BEGIN
  FOREACH role IN ARRAY ARRAY['wherry_auditor', 'wherry_worker', 'wherry_registrar'] LOOP
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = role) THEN
      EXECUTE format('CREATE ROLE %I NOLOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOBYPASSRLS', role);
    END IF;
  END LOOP;
  -- What was added since is taken back: attributes, memberships of the roles themselves, and policies.
  FOR has IN SELECT rolname FROM pg_catalog.pg_roles
    WHERE rolname IN ('wherry_auditor', 'wherry_worker', 'wherry_registrar')
      AND (rolsuper OR rolcreatedb OR rolcreaterole OR rolbypassrls OR rolcanlogin OR rolreplication) LOOP
    EXECUTE format('ALTER ROLE %I NOLOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOBYPASSRLS NOREPLICATION', has.rolname);
  END LOOP;
  FOR has IN SELECT above.rolname AS above, below.rolname AS below FROM pg_catalog.pg_auth_members AS one
    JOIN pg_catalog.pg_roles AS above ON above.oid = one.roleid
    JOIN pg_catalog.pg_roles AS below ON below.oid = one.member
    WHERE below.rolname IN ('wherry_auditor', 'wherry_worker', 'wherry_registrar') LOOP
    EXECUTE format('REVOKE %I FROM %I', has.above, has.below);
  END LOOP;
  FOR has IN SELECT policyname, tablename FROM pg_catalog.pg_policies WHERE schemaname = 'wherry' LOOP
    EXECUTE format('DROP POLICY %I ON wherry.%I', has.policyname, has.tablename);
  END LOOP;
END
$$;

REVOKE ALL ON SCHEMA wherry FROM PUBLIC, wherry_auditor, wherry_worker, wherry_registrar CASCADE;
REVOKE ALL ON ALL TABLES IN SCHEMA wherry FROM PUBLIC, wherry_auditor, wherry_worker, wherry_registrar CASCADE;
GRANT USAGE ON SCHEMA wherry TO wherry_auditor, wherry_worker, wherry_registrar;
GRANT SELECT ON ALL TABLES IN SCHEMA wherry TO wherry_auditor, wherry_worker, wherry_registrar;

-- Appends, and what is derived from statements. Rows of `statement`, `edge`, `conversion` and `checkpoint` are only added.
GRANT INSERT ON wherry.statement, wherry.edge, wherry.conversion, wherry.checkpoint TO wherry_worker, wherry_registrar;
ALTER TABLE wherry.statement ENABLE ROW LEVEL SECURITY; -- not of its owner
CREATE POLICY wherry_reads ON wherry.statement FOR SELECT USING (true); -- whoever is granted SELECT reads all of it
-- Policies ask for the role instead of being granted to it: `DROP OWNED BY` of a member would drop them.
CREATE POLICY wherry_worker_states ON wherry.statement FOR INSERT
  WITH CHECK (pg_has_role(current_user, 'wherry_worker', 'USAGE')
    AND kind IN ('conversion', 'verification', 'sighting', 'audit', 'note'));
CREATE POLICY wherry_registrar_states ON wherry.statement FOR INSERT
  WITH CHECK (pg_has_role(current_user, 'wherry_registrar', 'USAGE')
    AND kind IN ('conversion', 'verification', 'sighting', 'audit', 'note',
      'claim', 'release', 'registration', 'promotion', 'rollback', 'deletion'));
-- Of everyone: a body that is a table, and times that are those of the server's clock, give or take a day.
CREATE POLICY wherry_form ON wherry.statement AS RESTRICTIVE FOR INSERT
  WITH CHECK (json_typeof(body::json) = 'object'
    AND "time" ~ '^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?\+00:00$'
    AND storage_time ~ '^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?\+00:00$'
    AND "time"::timestamptz BETWEEN now() - interval '1 day' AND now() + interval '1 day'
    AND storage_time::timestamptz BETWEEN now() - interval '1 day' AND now() + interval '1 day');
GRANT INSERT, UPDATE ON wherry.location, wherry.tombstone, wherry.verification, wherry.projection
  TO wherry_worker, wherry_registrar;
GRANT DELETE ON wherry.tombstone TO wherry_worker, wherry_registrar; -- a checkpoint that is there again

-- Model versions are stated by the registrar alone.
GRANT INSERT, UPDATE, DELETE ON wherry.registration TO wherry_registrar;
